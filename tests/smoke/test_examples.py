"""What `make train` does after its installation; `tests/all` has the other examples."""

import re
from pathlib import Path

import pytest

from tests.all.processes.test_examples import (
    EXAMPLES,
    NUM_IMAGES,
    THROUGHPUT,
    check_reports,
    run,
)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_make_train(tmp_path: Path) -> None:
    lines, _ = run([EXAMPLES / "make_train.py", "--epoch", "1", "--out", tmp_path])
    begins = [index for index, line in enumerate(lines) if line.startswith("----")]
    for num_workers, folder, begin, end in (
        (1, "one-worker", begins[0], begins[1]),
        (2, "two-workers", begins[1], len(lines)),
    ):
        part = lines[begin + 1 : end]
        assert part[:2] == ["Start a training script using multiple nodes.", "=" * 42]
        assert part[2] == f"Num process (COMM_WORLD): {num_workers}"
        assert re.fullmatch(r"Using [a-z_]+ communicator", part[4])
        assert part[5:8] == ["Num Minibatch-size: 32", "Num epoch: 1", "=" * 42]
        [last] = [index for index, line in enumerate(part) if THROUGHPUT.fullmatch(line)]
        check_reports(
            part[: last + 1],
            tmp_path / folder,
            num_epochs=1,
            num_iterations=-(-NUM_IMAGES // (32 * num_workers)),
        )
    comparison = [line for line in lines if line.startswith(("Speed-up", "Parallel"))]
    speed_up = float(comparison[0].removeprefix("Speed-up of two workers over one: "))
    percent = comparison[1].removeprefix("Parallel efficiency: ").rstrip("%")
    assert int(percent) == pytest.approx(50 * speed_up, abs=1)
    assert lines[-1].endswith(str(tmp_path))
