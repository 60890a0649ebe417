"""Four scripts of pytorch/examples with at most seven changed lines, on 1, 2 and 4 ranks.

They need a checkout of pytorch/examples, real data and, three of them, torchvision:

    TORCHMN_TEST_PYTORCH_EXAMPLES=examples TORCHMN_TEST_DATA=... pytest -s tests/all/processes/...

Every run prints the numbers that `docs/how-to/port-a-script.md` shows.
"""

import gzip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.limits import limit
from tests.unit.examples.datasets.makers import unpack_flowers

from .ported_scripts import IMAGENET, LANGUAGE_MODEL, MNIST, PORTS, VAE, Port

EXAMPLES = os.environ.get("TORCHMN_TEST_PYTORCH_EXAMPLES", "")
DATA = os.environ.get("TORCHMN_TEST_DATA", "")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "port-a-script.md"
NUM_RANKS = (1, 2, 4)
# Images of MNIST: the last batch has 2 images, so 2 of 4 ranks have none of it.
NUM_TRAIN, NUM_TEST = 2050, 1000
# Of each class in training: the last batch has 13, which 2 and 4 ranks cannot divide evenly.
NUM_PHOTOS = 41


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.folder)
def test_at_most_seven_lines(port: Port) -> None:
    assert port.num_changed_lines <= 7


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.folder)
def test_the_page_shows_these_lines(port: Port) -> None:
    blocks = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.removeprefix("+") for line in "".join(blocks).splitlines()]
    shown = _without_layout(" ".join(lines))
    for change in port.changes:
        for line in change.new:
            assert _without_layout(line) in shown, line


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.folder)
def test_the_losses_of_one_process(port: Port, tmp_path: Path) -> None:
    """Where both scripts draw no noise: dropout, random crops, the noise of a VAE."""
    _require(port)
    _prepare(port, tmp_path)
    wanted = _run(port, tmp_path, 0)
    assert wanted, "the script prints what is compared"
    print(f"\n{port.folder}, plain script: {wanted}")
    for num_ranks in NUM_RANKS:
        found = _run(port, tmp_path, num_ranks)
        print(f"{port.folder}, {num_ranks} rank(s): {found}")
        assert len(found) == len(wanted)
        for own, expected in zip(found, wanted, strict=True):
            assert own == pytest.approx(expected, rel=2e-3, abs=1.001e-2)
        _compare_parameters(port, tmp_path, num_ranks)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("port", [MNIST, VAE], ids=lambda port: port.folder)
def test_the_losses_with_noise_are_close(port: Port, tmp_path: Path) -> None:
    """As they are: ranks draw other dropout masks and noise than one process does."""
    _require(port)
    _prepare(port, tmp_path)
    wanted = _run(port, tmp_path, 0, has_noise=True)
    print(f"\n{port.folder} with noise, plain script: {wanted}")
    for num_ranks in NUM_RANKS:
        found = _run(port, tmp_path, num_ranks, has_noise=True)
        print(f"{port.folder} with noise, {num_ranks} rank(s): {found}")
        assert found[-1][0] == pytest.approx(wanted[-1][0], rel=0.2)
        if num_ranks == 1:
            assert found == wanted


def _require(port: Port) -> None:
    if not EXAMPLES:
        pytest.skip(reason="TORCHMN_TEST_PYTORCH_EXAMPLES names no checkout of pytorch/examples")
    if not DATA:
        pytest.skip(reason="TORCHMN_TEST_DATA names no folder with data sets")
    if port.needs_torchvision and importlib.util.find_spec("torchvision") is None:
        pytest.skip(reason="torchvision is not installed")


def _prepare(port: Port, folder: Path) -> None:
    """Write the scripts and the data that they read."""
    original = Path(EXAMPLES) / port.folder
    for num_ranks in (0, *NUM_RANKS):
        place = folder / str(num_ranks)
        place.mkdir()
        for file in original.glob("*.py"):
            shutil.copy(file, place)
        if port is VAE:
            (place / "results").mkdir()
    if port in (MNIST, VAE):
        _write_mnist(folder / "data" / "MNIST" / "raw")
    elif port is IMAGENET:
        unpack_flowers(Path(DATA), folder / "photos", train=NUM_PHOTOS, val=30)
        for num_ranks in (0, *NUM_RANKS):
            (folder / str(num_ranks) / "photos").symlink_to(folder / "photos")
    else:
        _write_text(folder)


def _write_mnist(raw: Path) -> None:
    """The first images, as the files that torchvision reads."""
    raw.mkdir(parents=True)
    for name, num in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            file = f"{name}-{kind}-ubyte"
            content = bytearray(gzip.decompress((Path(DATA) / "mnist" / f"{file}.gz").read_bytes()))
            content[4:8] = np.array([num], dtype=">i4").tobytes()
            (raw / file).write_bytes(content[: header + num * item])


def _write_text(folder: Path) -> None:
    path = Path(DATA) / "text-lm" / "wikitext2.valid.txt.gz"
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines(keepends=True)
    (folder / "text").mkdir()
    for name, part in (
        ("train", lines[:1200]),
        ("valid", lines[1200:1400]),
        ("test", lines[1400:1600]),
    ):
        (folder / "text" / f"{name}.txt").write_text("".join(part), encoding="utf-8")


def _run(
    port: Port,
    folder: Path,
    num_ranks: int,
    options: list[str] | None = None,
    *,
    has_noise: bool = False,
) -> list[list[float]]:
    """The numbers that are compared; 0 ranks: the original script in one process."""
    place = folder / str(num_ranks)
    script = place / "main.py"
    original = Path(EXAMPLES) / port.folder / "main.py"
    port.write(original, script, is_ported=num_ranks > 0, has_noise=has_noise)
    launcher = ["-m", "torchmn", "run", "-n", str(num_ranks)] if num_ranks else []
    arguments = [*port.arguments, *(options or [])]
    if port is LANGUAGE_MODEL:
        arguments += ["--data", str(folder / "text")]
    done = subprocess.run(
        [sys.executable, *launcher, "main.py", *arguments],
        capture_output=True,
        text=True,
        timeout=limit(600),
        check=False,
        cwd=place,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = re.finditer(port.compared, done.stdout)
    return [[float(number) for number in match.groups()] for match in found]


def _compare_parameters(port: Port, folder: Path, num_ranks: int) -> None:
    """Those that rank 0 has saved, where the script saves them."""
    name = {"mnist": "mnist_cnn.pt", "imagenet": "checkpoint.pth.tar"}.get(port.folder)
    if name is None:
        return
    states = [torch.load(folder / str(n) / name, weights_only=True) for n in (0, num_ranks)]
    plain, ported = (state.get("state_dict", state) for state in states)
    for key, value in plain.items():
        torch.testing.assert_close(
            ported[key], value, rtol=10 * port.tolerance, atol=port.tolerance
        )


def _without_layout(code: str) -> str:
    """Without spaces and line ends."""
    return re.sub(r"\s", "", code)
