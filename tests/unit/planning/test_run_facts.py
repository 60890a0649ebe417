"""A description from recorded runs, and predictions from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.errors import TorchmnError
from torchmn.planning.description import PAYLOAD_SHARE
from torchmn.planning.prediction import predict_setting
from torchmn.planning.sources import known_of
from torchmn.profiling.run_reader import read_run

RUN = ImitatedRun(
    num_ranks=2,
    settings={"schedule": "every_step", "codec": "float32", "bucket_bytes": "4000000"},
)
ALONE = replace(RUN, num_ranks=1, bucket_nbytes=(), seed=1)


def step_s(folder: Path) -> float:
    ranks = read_run(folder).ranks
    return float(np.mean(np.concatenate([rank.steps.seconds[10:] for rank in ranks])))


def test_the_step_of_the_run_itself(tmp_path: Path) -> None:
    folders = [ALONE.write(tmp_path / "alone"), RUN.write(tmp_path / "two")]
    known = known_of(folders)
    assert known.setting.hosts == 2
    assert known.setting.samples == 32
    assert known.batches[0].compute_s == pytest.approx(0.099, rel=0.02)
    assert known.link is not None
    assert known.link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.1)
    predicted = predict_setting(known, known.setting)
    assert predicted.seconds == pytest.approx(step_s(folders[1]), rel=0.02)
    assert predicted.low_s < step_s(folders[1]) < predicted.high_s


def test_a_slower_link_that_was_not_recorded(tmp_path: Path) -> None:
    known = known_of([ALONE.write(tmp_path / "alone"), RUN.write(tmp_path / "two")])
    slow = replace(RUN, bandwidth_bytes_per_s=1e8, seed=2).write(tmp_path / "slow")
    rate = f"{1e8 / PAYLOAD_SHARE * 8e-6:.1f}mbit"
    predicted = predict_setting(known, msgspec.structs.replace(known.setting, rate=rate))
    assert predicted.seconds == pytest.approx(step_s(slow), rel=0.05)


def test_two_batch_sizes_allow_a_third(tmp_path: Path) -> None:
    larger = replace(ALONE, samples=64, slower={(0, "forward"): 2.0, (0, "backward"): 2.0})
    folders = [RUN.write(tmp_path / "two"), larger.write(tmp_path / "larger")]
    known = known_of(folders)
    assert known.compute_of(48).compute_s == pytest.approx(0.099 + 0.045, rel=0.03)
    with pytest.raises(TorchmnError, match="measured were 32, 64"):
        known.compute_of(16)


def test_noise_is_what_ranks_wait_for(tmp_path: Path) -> None:
    noisy = replace(RUN, jitter=0.1).write(tmp_path / "noisy")
    known = known_of([noisy])
    many = predict_setting(known, msgspec.structs.replace(known.setting, hosts=16))
    few = predict_setting(known, known.setting)
    assert many.step.straggler_s > 1.5 * few.step.straggler_s > 0


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([ALONE], "no run .* when gradients are ready|No run in"),
        ([replace(RUN, num_steps=6)], "Record 20 steps or more"),
    ],
)
def test_too_little(tmp_path: Path, runs: list[ImitatedRun], reason: str) -> None:
    folders = [run.write(tmp_path / str(number)) for number, run in enumerate(runs)]
    with pytest.raises(TorchmnError, match=reason):
        known_of(folders)


def test_no_records(tmp_path: Path) -> None:
    with pytest.raises(TorchmnError, match="No records of a run"):
        known_of([tmp_path])
