"""A small real training continues smoothly with another number of workers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"


@pytest.mark.slow
def test_the_training_loss_of_digits_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench-resume` does this for all; loading the model alone is what a jump looks like."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_resume")
    monkeypatch.setattr(bench, "STEPS_BEFORE", 40)
    every_step = bench.measure(bench.WAYS["every step, 1bit"], 2, 3, num_seeds=2)
    blocks = bench.measure(bench.WAYS["diloco, overlap, fragments, int8"], 3, 2, num_seeds=2)
    for found in (every_step, blocks):
        assert max(found.jumps) <= 1
        assert max(found.jumps) < max(found.jumps_of_model_only) / 3
