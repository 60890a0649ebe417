"""Accuracy of codecs and schedules relative to synchronous float32, for the same samples.

    bench_accuracy.py [--tasks NAME,...] [--only SIDE,...] [--seeds 0,1,...] [--resume] [--report]

Two workers with one thread each, without a limit on their link, which does not affect the result.
Every run is appended to `records/accuracy_runs.jsonl`; the table covers all of them and names those
that are missing. TORCHMN_TEST_DATA is the folder of the data.
"""

from __future__ import annotations

import sys

from accuracy.bars import bars_of
from accuracy.execution import run_experiment
from accuracy.experiments import TABLE

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from accuracy.worker import work

        work(*sys.argv[2:])
    else:
        raise SystemExit(run_experiment("accuracy", TABLE, bars_of, __doc__))
