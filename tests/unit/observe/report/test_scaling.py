"""Speed-up, efficiency and the fit of Amdahl's law."""

from pathlib import Path

import pytest

from tests.unit.recorded_runs import PHASE_S, ImitatedRun
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.summary import Summary, summarize
from torchmn.observe.report.tables import Scaling, scaling_of

ONE_STEP_S = sum(PHASE_S.values())


def run_with(folder: Path, size: int, step_s: float) -> Summary:
    """A step lasts ``step_s`` on each of ``size`` ranks, each with 32 samples."""
    imitated = ImitatedRun(
        num_ranks=size,
        jitter=0.0,
        bucket_nbytes=(),
        extra={"other": (1, step_s - ONE_STEP_S)},
        num_steps=8,
    )
    return summarize(read_run(imitated.write(folder / f"{size}-{step_s}")))


def amdahl_runs(folder: Path, serial: float, sizes: tuple[int, ...]) -> Scaling:
    """The same samples per rank: a step is longer by what does not become shorter."""
    return scaling_of(
        [run_with(folder, size, 0.1 * (serial * size + 1 - serial)) for size in sizes]
    )


@pytest.mark.parametrize("serial", [0.0, 0.03, 0.2])
def test_the_serial_part_is_found(tmp_path: Path, serial: float) -> None:
    scaling = amdahl_runs(tmp_path, serial, (4, 1, 2, 8))
    assert [point.num_ranks for point in scaling.points] == [1, 2, 4, 8]
    assert scaling.serial_share == pytest.approx(serial, abs=1e-4)
    for point in scaling.points:
        assert point.speedup == pytest.approx(1 / (serial + (1 - serial) / point.num_ranks), 1e-4)
        assert point.speedup == pytest.approx(scaling.amdahl(point.num_ranks), rel=1e-3)
        assert point.efficiency == pytest.approx(point.speedup / point.num_ranks)


def test_without_a_run_of_one_rank_the_smallest_is_the_base(tmp_path: Path) -> None:
    scaling = scaling_of([run_with(tmp_path, 2, 0.1), run_with(tmp_path, 4, 0.125)])
    assert [point.speedup for point in scaling.points] == pytest.approx([2, 3.2])
    assert [point.efficiency for point in scaling.points] == pytest.approx([1, 0.8])
    assert scaling.amdahl(4) == pytest.approx(3.2)


def test_runs_of_one_size_have_no_fit(tmp_path: Path) -> None:
    scaling = scaling_of([run_with(tmp_path, 2, 0.1), run_with(tmp_path, 2, 0.12)])
    assert scaling.serial_share is None
    assert len(scaling.points) == 2
