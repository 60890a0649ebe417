"""Combinations of three axes in which every two values of different axes meet.

A mistake in how two things work together fails in each combination that has both. All products of
schedules, codecs and placements would find those of three things too, for several times the time.
"""

from collections.abc import Collection, Iterable
from itertools import product


def in_pairs(
    first: Iterable[str],
    second: Iterable[str],
    third: Iterable[str],
    *,
    excluded: Collection[tuple[str, str]] = (),
) -> list[tuple[str, str, str]]:
    """Every pair of ``first`` and ``second`` once, each with the ``third`` that is most wanted.

    Pairs of any two axes that are ``excluded`` do not meet. Raises ValueError: others do not,
    either, as ``third`` is longer than one of the axes before it.
    """
    first, second, third = list(first), list(second), list(third)
    missing = {*product(first, third), *product(second, third)} - {*excluded}
    chosen = []
    for (i, a), (j, b) in product(enumerate(first), enumerate(second)):
        if (a, b) in excluded:
            continue
        turned = third[(i + j) % len(third) :] + third[: (i + j) % len(third)]
        possible = [c for c in turned if not {(a, c), (b, c)} & {*excluded}]
        c = max(possible, key=lambda c: len(missing & {(a, c), (b, c)}))
        missing -= {(a, c), (b, c)}
        chosen.append((a, b, c))
    if missing:
        raise ValueError(f"{sorted(missing)} do not meet. Let the third axis be the shortest.")
    return chosen
