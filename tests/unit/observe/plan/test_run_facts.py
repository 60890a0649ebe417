"""The facts of a recorded run, and predictions from them."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.errors import TorchmnError
from torchmn.observe.plan.facts import PAYLOAD_SHARE, predict, rate_bytes_per_s
from torchmn.observe.plan.run_facts import facts_of
from torchmn.observe.read.run_reader import read_run
from torchmn.record.records import Line, Step

RUN = ImitatedRun(
    num_ranks=2, settings={"schedule": "every_step", "codec": "float32", "bucket_bytes": "4000000"}
)
ALONE = replace(RUN, num_ranks=1, bucket_nbytes=(), seed=1)


def step_s(folder: Path) -> float:
    ranks = read_run(folder).ranks
    return float(np.mean(np.concatenate([rank.steps.seconds[10:] for rank in ranks])))


def test_the_step_of_the_run_itself(tmp_path: Path) -> None:
    folder = RUN.write(tmp_path / "two")
    known = facts_of(folder)
    assert (known.hosts, known.samples, known.num_ranks) == (2, 32, 2)
    assert known.compute_s == pytest.approx(0.099, rel=0.02)
    assert known.rate is not None
    assert rate_bytes_per_s(known.rate) * PAYLOAD_SHARE == pytest.approx(1e9, rel=0.1)
    assert predict(known).seconds == pytest.approx(step_s(folder), rel=0.02)


def test_a_slower_link_that_was_not_recorded(tmp_path: Path) -> None:
    known = facts_of(RUN.write(tmp_path / "two"))
    slow = replace(RUN, bandwidth_bytes_per_s=1e8, seed=2).write(tmp_path / "slow")
    rate = f"{1e8 / PAYLOAD_SHARE * 8e-6:.1f}mbit"
    predicted = predict(msgspec.structs.replace(known, rate=rate))
    assert predicted.seconds == pytest.approx(step_s(slow), rel=0.05)


def test_what_no_phase_explains_is_the_cost_of_sending(tmp_path: Path) -> None:
    """The step of the model is the recorded one."""
    free = facts_of(RUN.write(tmp_path / "two"))
    folder = replace(RUN, extra={"encode": (1, 0.02)}).write(tmp_path / "busy")
    known = facts_of(folder)
    assert predict(known).seconds == pytest.approx(step_s(folder), rel=0.02)
    assert predict(known).coding_s == pytest.approx(0.02, rel=0.3)
    assert free.send_s_per_byte is not None
    assert known.send_s_per_byte is not None
    assert known.send_s_per_byte > free.send_s_per_byte + 5e-10


class EncodedRun(ImitatedRun):
    """Each of the three buckets is encoded in 1 ms and decoded in 1.5 ms, to a quarter."""

    def lines(self) -> list[list[Line]]:
        return [[self._encoded(line) for line in lines] for lines in super().lines()]

    def _encoded(self, line: Line) -> Line:
        if not isinstance(line, Step):
            return line
        change = msgspec.structs.replace
        buckets = [
            change(each, sent_nbytes=each.nbytes // 4, encode_s=1e-3, decode_s=1.5e-3)
            for each in line.buckets
        ]
        return change(line, buckets=buckets)


def test_a_codec_as_recorded(tmp_path: Path) -> None:
    run = EncodedRun(num_ranks=2, settings={**RUN.settings, "codec": "int8"})
    known = facts_of(run.write(tmp_path / "int8"))
    codec = known.codecs[known.codec]
    assert codec.bits == pytest.approx(8.0)
    # per element of the 2.5 million; two ranks decode one half, and then what they have summed
    assert codec.encode_s == pytest.approx(3e-3 / 2.5e6)
    assert codec.decode_s == pytest.approx(4.5e-3 / 2.5e6 / 1.5)


def test_noise_is_what_ranks_wait_for(tmp_path: Path) -> None:
    known = facts_of(replace(RUN, jitter=0.1).write(tmp_path / "noisy"))
    many = predict(msgspec.structs.replace(known, hosts=16))
    assert many.straggler_s > 1.5 * predict(known).straggler_s > 0


def test_one_host_shows_no_link(tmp_path: Path) -> None:
    known = facts_of(replace(RUN, ranks_per_host=2).write(tmp_path / "one"))
    assert known.rate is None
    with pytest.raises(TorchmnError, match="Record a run with several hosts"):
        predict(msgspec.structs.replace(known, hosts=2))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (ALONE, "Its gradients are not known"),
        (replace(RUN, num_steps=6), "Record 20 steps or more"),
    ],
)
def test_too_little(tmp_path: Path, run: ImitatedRun, reason: str) -> None:
    with pytest.raises(TorchmnError, match=reason):
        predict(facts_of(run.write(tmp_path / "run")))
