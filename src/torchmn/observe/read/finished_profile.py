"""What is made of the ranks' profiles at the end of a run."""

from __future__ import annotations

from pathlib import Path

from torchmn.observe.read.merged_trace import merge_traces
from torchmn.record.function_times import merge_profiles
from torchmn.record.profile_request import FOLDER


def finish_profile(run: Path) -> list[str]:
    """Put together what ranks have left in a run's folder, or in those of its rounds.

    Returns what was made, as texts. Raises DataError: no trace can be read.
    """
    made = []
    for folder in (run / FOLDER, *sorted(run.glob(f"*/{FOLDER}"))):
        if folder.is_dir():
            trace, table = merge_traces(folder), merge_profiles(folder)
            if trace is not None:
                made.append(f"profile of all ranks, for ui.perfetto.dev: {trace}")
            if table is not None:
                made.append(f"times of functions on all ranks: {table}")
    return made
