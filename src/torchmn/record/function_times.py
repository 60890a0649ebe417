"""The times of functions by rank, from the files of cProfile, in one table."""

from __future__ import annotations

import marshal
from collections import defaultdict
from pathlib import Path

from torchmn.cluster.units import counted
from torchmn.control.private_files import open_private

TABLE = "cprofile.txt"
_NUM_SHOWN = 60
Function = tuple[str, int, str]


def merge_profiles(folder: Path) -> Path | None:
    """Write the table of the ``.prof`` files in a folder to its `TABLE`; None if it has none.

    A function's line has its calls and its own seconds over all ranks, and those of the rank in
    which it took least and most.
    """
    own_s: dict[Function, dict[str, float]] = defaultdict(dict)
    total_s: dict[Function, float] = defaultdict(float)
    calls: dict[Function, int] = defaultdict(int)
    names, skipped = [], []
    for path in sorted(folder.glob("*.prof")):
        try:
            stats = marshal.loads(path.read_bytes())
            for function, (_, num_calls, own, cumulative, _) in stats.items():
                own_s[function][path.stem] = own
                total_s[function] += cumulative
                calls[function] += num_calls
            names.append(path.stem)
        except (OSError, ValueError, EOFError, TypeError, AttributeError) as error:
            skipped.append(f"{path.name} cannot be read: {error}")
    if not names:
        return None
    lines = [
        f"Seconds in functions on {counted(len(names), 'rank')}: {', '.join(names)}",
        *skipped,
        "",
        f"{'calls':>10} {'own s':>9} {'with calls':>11} {'least':>9} {'most':>9}  "
        f"{'most on':<16} function",
    ]
    ordered = sorted(own_s, key=lambda function: -sum(own_s[function].values()))
    for function in ordered[:_NUM_SHOWN]:
        by_rank = {name: own_s[function].get(name, 0.0) for name in names}
        slowest = max(by_rank, key=by_rank.__getitem__)
        file, line, name = function
        where = f"{name}" if file == "~" else f"{name} ({file}:{line})"
        lines.append(
            f"{calls[function]:>10} {sum(by_rank.values()):>9.3f} {total_s[function]:>11.3f} "
            f"{min(by_rank.values()):>9.3f} {by_rank[slowest]:>9.3f}  {slowest:<16} {where}"
        )
    table = folder / TABLE
    with open(table, "w", encoding="utf-8", errors="replace", opener=open_private) as output:
        output.write("\n".join(lines) + "\n")
    return table
