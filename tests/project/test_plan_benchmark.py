"""`make bench-plan`: the source documents' tables have answers; cases are those of the model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from torchmn.planning.description import BatchTime, CodecTime, Description, Link
from torchmn.planning.prediction import predict_setting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.usefixtures("_on_path")
def test_every_row_of_the_sources_has_an_answer() -> None:
    sources = importlib.import_module("plan.sources")
    bars = sources.source_bars()
    assert [bar.bar.rpartition(": the source")[0].rpartition(": ")[2] for bar in bars] == [
        "2 GPUs of one node",
        "2 nodes with 2 GPUs each",
        "64 GPUs",
        "128 GPUs",
        "240 GPUs",
    ]
    for bar in bars:
        low, high = bar.interval
        assert low <= bar.value <= high
    assert bars[2].value == 1.0  # the others are relative to it
    assert bars[3].value < 2.0
    assert bars[4].value < 240 / 64


@pytest.mark.usefixtures("_on_path")
def test_at_least_twelve_cases_are_predicted_in_every_direction() -> None:
    cases = importlib.import_module("plan.settings").CASES
    predicted = [case for case in cases if not case.is_fitted]
    assert len(predicted) >= 12
    assert {case.num_hosts for case in predicted} == {1, 2, 4}
    assert {case.rate for case in predicted} == {"10gbit", "1gbit", "100mbit"}
    settings = [case.setting(num_cores=2) for case in predicted]
    assert {setting.codec for setting in settings} == {"float32", "int8", "1bit"}
    assert {setting.schedule for setting in settings} == {
        "every_step",
        "periodic_average",
    }
    assert {setting.cores_per_rank for setting in settings} == {0.5, 1.0}
    known = Description(
        batches=[BatchTime(samples=32, compute_s=0.6)],
        parameters=15_000_000,
        link=Link(rate="10gbit", latency_s=1e-4),
        codecs={name: CodecTime(bits=8, encode_s=1e-9, decode_s=1e-9) for name in ("int8", "1bit")},
    )
    for setting in settings:
        assert predict_setting(known, setting).seconds >= 0.6
