"""Units of sizes, texts for numbers and lists, and grouping of values by key."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


def counted(number: float, noun: str, spec: str = "") -> str:
    """Format a number by ``spec``, with its noun in the singular or plural.

    >>> counted(1, "rank"), counted(2, "rank"), counted(0.46, "core", ".2g")
    ('1 rank', '2 ranks', '0.46 cores')
    >>> counted(2, "pass"), counted(2, "batch")
    ('2 passes', '2 batches')
    """
    text = format(number, spec)
    return f"{text} {noun if text == '1' else _plural(noun)}"


def listed(noun: str, items: Sequence[object]) -> str:
    """Format a noun in the singular or plural, followed by the numbers of the things.

    >>> listed("rank", [3]), listed("core", [0, 1])
    ('rank 3', 'cores 0, 1')
    """
    return f"{noun if len(items) == 1 else _plural(noun)} {', '.join(map(str, items))}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Format numbers in ascending order, with consecutive ones as ranges.

    >>> spans([7, 0, 1, 2, 5, 8])
    ['0-2', '5', '7-8']
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ["-".join(map(str, span)) for span in found]


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group (key, value) pairs into a list of values per key.

    >>> grouped([("a", 0), ("b", 1), ("a", 2)])
    {'a': [0, 2], 'b': [1]}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
