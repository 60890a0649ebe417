"""One example of each kind, and what `make train` does after its installation."""

import re
from pathlib import Path

import pytest

from tests.all.processes.test_cntk_examples import LAUNCHER, TEST, epochs
from tests.all.processes.test_examples import (
    EXAMPLES,
    NUM_IMAGES,
    THROUGHPUT,
    TWO_STEPS,
    check_reports,
    launched,
    run,
)
from tests.unit.examples.datasets.makers import write_mnist_folder


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


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_mnist_script_with_two_workers(tmp_path: Path) -> None:
    launcher = ["-m", "torchmn", "run", "-n", "2", "--log-dir", tmp_path / "workers"]
    script = EXAMPLES / "mnist/train_mnist.py"
    options = [*TWO_STEPS, "--batchsize", "400", "--warmup", "0.5", "--out", tmp_path]
    lines, _ = run([*launcher, script, *options])
    assert lines[0] == "Num process (COMM_WORLD): 2"
    check_reports(lines, tmp_path, num_epochs=1, num_iterations=2)


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_layers_divided_among_workers() -> None:
    one, three = (launched("train_mnist_split.py", n) for n in (1, 3))
    assert three == one
    assert one[1] < one[0]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_mnist_text_until_it_no_longer_improves(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_mnist_folder(tmp_path / "mnist", is_packed=False)
    run([EXAMPLES / "cntk/make_data.py", "mnist", "--data-root", tmp_path, "--out", data])
    options = ["-datadir", data, "-outputdir", tmp_path / "models", "-m", "2", "-n", "9"]
    launcher = [*LAUNCHER, "--log-dir", tmp_path / "logs"]
    lines, _ = run([*launcher, EXAMPLES / "cntk/train_mnist_ctf.py", *options])
    found = epochs(lines)
    assert found[0::2] == sorted(found[0::2])
    assert set(found) == set(found[0::2])  # both ranks print the same
    errors = [float(m[1]) for line in lines if (m := TEST.match(line))]
    best, num_worse = float("inf"), 0
    for error in errors[: len(errors) // 2]:
        num_worse = 0 if error < best else num_worse + 1
        best = min(best, error)
    assert num_worse == 2 or len(found) == 18
