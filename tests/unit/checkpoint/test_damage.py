"""Truncated, damaged or missing files: the previous checkpoint is used, with a warning."""

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchmn
from tests.unit.checkpoint.training import Training, names, on_ranks, train, with_warnings
from torchmn.checkpoint import manifest as manifest_file
from torchmn.data import rng_state
from torchmn.errors import CheckpointWarning, DataError

NUM_RANKS = 2
NEWEST, BEFORE = "step-00000002", "step-00000001"
FILES = ["manifest.json"] + [
    f"rank{r:04d}.{kind}" for r in range(NUM_RANKS) for kind in ("json", "safetensors")
]
OFFSETS = [0, 3, 7, 8, 9, 40, 1 / 4, 1 / 2, 3 / 4, -9, -2, -1]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    train(path, NUM_RANKS, 2)
    return path


@pytest.fixture
def path(two_checkpoints: Path, tmp_path: Path) -> Path:
    shutil.copytree(two_checkpoints, tmp_path / "copy")
    return tmp_path / "copy"


def resume(path: Path, num_ranks: int = NUM_RANKS) -> list[tuple[int, list[str]]]:
    """(step, warnings) on every rank."""

    def rank_main(comm: torchmn.Communicator) -> tuple[int, list[str]]:
        training = Training(comm)
        checkpointer, warned = with_warnings(comm, path)
        return checkpointer.resume(training.state), warned

    return on_ranks(rank_main, num_ranks)


def flip(file: Path, offset: float, bit: int) -> None:
    raw = bytearray(file.read_bytes())
    place = int(offset * len(raw)) if isinstance(offset, float) else offset
    raw[place] ^= 1 << bit
    file.write_bytes(raw)


def test_good_checkpoints_give_no_warning(path: Path) -> None:
    assert resume(path) == [(2, []), (2, [])]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit(path: Path, file: str, offset: float) -> None:
    bit = FILES.index(file) + OFFSETS.index(offset)
    flip(path / "a run" / NEWEST / file, offset, bit % 8)
    (step, warned), (other_step, nothing) = resume(path)
    assert (step, other_step, nothing) == (1, 1, [])
    (message,) = warned
    assert file in message or "header" in message
    assert "damaged" in message
    assert NEWEST in message
    assert f"resumes from {BEFORE}" in message


@pytest.mark.parametrize("left", [0, 5, 1 / 2, -1])
@pytest.mark.parametrize("file", FILES)
def test_truncated(path: Path, file: str, left: float) -> None:
    whole = path / "a run" / NEWEST / file
    raw = whole.read_bytes()
    whole.write_bytes(raw[: int(left * len(raw)) if isinstance(left, float) else left])
    (step, warned), _ = resume(path)
    assert step == 1
    assert file in warned[0]


@pytest.mark.parametrize("file", FILES)
def test_missing_and_longer(path: Path, file: str) -> None:
    target = path / "a run" / NEWEST / file
    with target.open("ab") as out:
        out.write(b"\0")
    assert resume(path)[0][0] == 1
    target.unlink()
    (step, warned), _ = resume(path)
    assert step == 1
    assert f"{file} is missing" in warned[0]


@pytest.mark.parametrize("file", ["manifest.json", "rank0000.json", "rank0000.safetensors"])
@pytest.mark.parametrize("nbytes", [4 << 40, 900_000_000])
def test_file_that_is_a_hole(path: Path, file: str, nbytes: int) -> None:
    """Nothing of this size is allocated, even where the manifest says the same."""
    target = path / "a run" / NEWEST / file
    manifest = target.with_name("manifest.json")
    target.write_bytes(b"")
    os.truncate(target, nbytes)
    if file != "manifest.json":
        body = json.loads(manifest.read_bytes())["manifest"]
        body["files"][file]["nbytes"] = nbytes
        manifest.write_bytes(sealed(json.dumps(body).encode()))
    tracemalloc.start()
    try:
        (step, (warned,)), _ = resume(path)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert step == 1
    assert file in warned


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("file", FILES)
def test_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int) -> None:
    """On one rank alone, as every rank reads its own files, or rank 0 the manifest."""
    opened = Path.open

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == file and self.parent.name == NEWEST:
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    (step, (warned,)), (other_step, nothing) = resume(path)
    assert (step, other_step, nothing) == (1, 1, [])
    assert f"{NEWEST}: {file} cannot be opened: {os.strerror(number)}" in warned
    assert f"resumes from {BEFORE}" in warned


def test_none_is_good(path: Path) -> None:
    flip(path / "a run" / NEWEST / "manifest.json", 1 / 2, 0)
    flip(path / "a run" / BEFORE / "rank0001.safetensors", -1, 7)
    with pytest.raises(DataError) as caught:
        resume(path)
    message = str(caught.value)
    assert f"{NEWEST}: manifest.json is damaged" in message
    assert f"{BEFORE}: rank0001.safetensors is damaged" in message
    assert "Move the folder away to start from scratch" in message


def test_unfinished_and_foreign_folders_are_no_checkpoints(path: Path) -> None:
    run = path / "a run"
    shutil.copytree(run / NEWEST, run / ".tmp-00000009-abcd")
    shutil.copytree(run / NEWEST, run / "step-00000009.bak")
    (run / "step-00000010").write_text("a file")
    assert [step for step, _ in resume(path)] == [2, 2]


def test_torn_newest_does_not_shadow_and_goes_later(path: Path) -> None:
    run = path / "a run"
    (run / NEWEST / "manifest.json").unlink()
    (run / ".tmp-00000003-abcd").mkdir()
    assert resume(path)[0][0] == 1
    with pytest.warns(CheckpointWarning, match="manifest.json is missing"):
        train(path, NUM_RANKS, 3, keep=1)
    assert names(path) == ["step-00000003-2"]  # a step after that of the torn one


def test_damaged_one_counts_for_nothing_when_old_ones_are_removed(path: Path) -> None:
    """With keep=2 the good one before a damaged one must stay."""
    flip(path / "a run" / NEWEST / "rank0000.safetensors", -1, 0)
    with pytest.warns(CheckpointWarning, match="rank0000.safetensors is damaged"):
        train(path, NUM_RANKS, 2, keep=2)
    assert names(path) == [BEFORE, NEWEST, f"{NEWEST}-2"]


# ---- parsers ----


def manifest_of(path: Path) -> bytes:
    return (path / "a run" / NEWEST / "manifest.json").read_bytes()


def sealed(body: bytes) -> bytes:
    """A manifest with the right checksum, whatever is in it."""
    return b'{"checksum":"%s","manifest":%s}\n' % (manifest_file.digest(body).encode(), body)


@pytest.mark.parametrize(
    "name", ["../x.json", "rank0000.json/../y", "/etc/passwd", "rank1.json", ""]
)
def test_names_of_files_are_those_of_shards(path: Path, name: str) -> None:
    body = json.loads(manifest_of(path))["manifest"]
    body["files"][name] = next(iter(body["files"].values()))
    with pytest.raises(DataError, match="not a valid manifest"):
        manifest_file.parse(sealed(json.dumps(body).encode()))


def reseal(path: Path, file: str, raw: bytes) -> None:
    """Replace a file, and the checksums with it."""
    folder = path / "a run" / NEWEST
    (folder / file).write_bytes(raw)
    body = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    body["files"][file] |= {"nbytes": len(raw), "checksum": manifest_file.digest(raw)}
    (folder / "manifest.json").write_bytes(sealed(json.dumps(body).encode()))


FORGED = [
    ["pickle", "gASVKAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjA10b3VjaCAvdG1wL3h4lIWUUpQu", ""],
    ["dtype", "load"],
    ["tensor", "load", [2], False],
    ["tensor", "float32", [10**12], False],
    ["tensor", "float32", [-1], False],
    ["array", "|O", [1]],
    ["array", "<f4", [10**9]],
    ["device", "nowhere"],
    ["set", [["list", []]]],
    ["dict", [[["list", []], 1]]],
    ["unknown", []],
    [],
    [["list"]],
]


@pytest.mark.parametrize("body", FORGED, ids=lambda body: str(body)[:30])
def test_forged_values(path: Path, body: Any) -> None:
    raw = json.loads((path / "a run" / NEWEST / "rank0000.json").read_bytes())
    raw["objects"]["scheduler"]["body"] = body
    for rank in range(NUM_RANKS):
        reseal(path, f"rank{rank:04d}.json", json.dumps(raw).encode())
    (step, warned), _ = resume(path)
    assert step == 1
    assert warned


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("numpy"),
        lambda state: state.update(numpy=state["numpy"][:1]),
        lambda state: state.update(python=(3, (1, 2), None)),
        lambda state: state.update(torch=state["torch"][:7]),
        lambda state: state.update(seed="x"),
    ],
)
def test_forged_random_states(damage: Callable[[dict[str, Any]], None]) -> None:
    state = rng_state.capture(torch.device("cpu"))
    rng_state.check(state)
    damage(state)
    with pytest.raises(DataError, match="random generators"):
        rng_state.check(state)
