"""The examples of CNTK's way of training, on small data that `make_data.py` makes."""

import re
from pathlib import Path

import pytest

from tests.all.processes.test_examples import EXAMPLES, run
from tests.unit.examples.datasets.makers import write_mnist_folder, write_npz

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LAUNCHER = ["-m", "torchmn", "run", "-n", "2"]
EPOCH = re.compile(r"Finished Epoch\[(\d) of (\d)\]: \[Training\] loss = ([\d.]+) \* (\d+), ")
TEST = re.compile(r"Finished Evaluation \[\d\]: Minibatch\[1-1\]: metric = ([\d.]+)% \* 4;")


def epochs(lines: list[str]) -> list[tuple[str, ...]]:
    return [found.groups() for line in lines if (found := EPOCH.match(line))]


def test_cifar10_with_one_bit_and_with_block_momentum(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    data = tmp_path / "data"
    source = write_npz(tmp_path / "cifar10.npz")
    run([EXAMPLES / "cntk/make_data.py", "cifar10", "--data-root", source, "--out", data])
    script = EXAMPLES / "cntk/resnet_cifar10_distributed.py"
    fixed = ["-datadir", data, "-e", "20", "-m", "8", "-blocks", "1", "-device", "-1"]
    fixed += ["-communicator", "flat"]  # quantizes between the ranks of a host, too
    for number, options in enumerate((["-q", "1", "-a", "16"], ["-b", "16"])):
        launcher = [*LAUNCHER, "--log-dir", tmp_path / f"logs{number}"]
        command = [*launcher, script, *fixed, *options, "-outputdir", tmp_path / f"models{number}"]
        lines, _ = run([*command, "-n", "1"])
        first = epochs(lines)
        assert len(first) == 2  # of both ranks
        assert first[0] == first[1]
        assert first[0][3] == "20"
        lines, _ = run([*command, "-n", "2"])  # continues
        assert any(line.startswith("Restoring training session") for line in lines)
        assert [row[:2] for row in epochs(lines)] == [("2", "2")] * 2
        errors = [found[1] for line in lines if (found := TEST.match(line))]
        assert len(errors) == 2
        assert errors[0] == errors[1]
    _, stderr = run([script, *fixed, "-q", "1", "-b", "16"], exit_code=1)
    assert "Block momentum cannot be used with quantization" in stderr


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
