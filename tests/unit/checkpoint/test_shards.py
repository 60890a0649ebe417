"""The parts of the format: who writes what, the files of tensors, what stays, the export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchmn
from tests.unit.checkpoint.training import Training, checkpointer_of, on_ranks, train
from torchmn.checkpoint import Best, FolderStorage, dcp, export_dcp
from torchmn.checkpoint.manifest import Manifest, checkpoints_to_delete, name_of, order_of
from torchmn.checkpoint.shard_file import ShardReader, TensorEntry, header_of, in_file_order
from torchmn.checkpoint.writer import owners
from torchmn.comm.checksums import digest
from torchmn.errors import DataError, UnsupportedError, UsageError


def entry(name: str, nbytes: int, checksum: str = "same") -> TensorEntry:
    return TensorEntry(name=name, dtype="uint8", shape=(nbytes,), checksum=checksum, nbytes=nbytes)


def test_own_tensors_are_written_by_their_rank_and_shared_ones_fill_up() -> None:
    shared = [entry(f"s{i}", 10) for i in range(8)]
    catalogues = [[*shared, entry("own", 40 if rank == 0 else 0, f"{rank}")] for rank in range(3)]
    owned = owners(catalogues)
    assert [table["own"] for table in owned] == [0, 1, 2]
    by = [owned[0][f"s{i}"] for i in range(8)]
    assert sorted(by) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert owned[0] | {"own": 0} == owned[1] | {"own": 0}


def test_what_some_ranks_share_is_written_by_one_of_them() -> None:
    catalogues = [[entry("a", 5, "x")], [entry("a", 5, "y")], [entry("a", 5, "y")]]
    owned = owners(catalogues)
    assert owned[0]["a"] == 0
    assert owned[1]["a"] == owned[2]["a"] in (1, 2)


def test_files_are_read_by_the_package_of_the_format(tmp_path: Path) -> None:
    train(tmp_path, 2, 1)
    folder = tmp_path / "a run" / "step-00000001"
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)

    def rank_main(comm: torchmn.Communicator) -> None:
        training = Training(comm)
        checkpointer_of(comm, tmp_path).resume(training.state)
        for name, tensor in training.model.state_dict().items():
            assert torch.equal(tensors[f"model/{name}"], tensor)

    on_ranks(rank_main, 2)


DTYPES = [torch.float64, torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.float8_e5m2]


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.ones(3, 2).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors["none"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "f", metadata={"by": "the package"})
    raw = (tmp_path / "f").read_bytes()
    nbytes = 8 + int.from_bytes(raw[:8], "little")
    file = FolderStorage(tmp_path).open(".", "f")
    reader = ShardReader(file, "f", digest(raw[:nbytes]))
    for name, tensor in tensors.items():
        memory = reader.read(name, digest(tensor))
        assert memory.view(tensor.dtype).view(tensor.shape).tolist() == tensor.tolist()
    reader.close()


def test_every_tensor_begins_at_a_multiple_of_its_element() -> None:
    entries = [
        TensorEntry(
            name=str(dtype),
            dtype=str(dtype).removeprefix("torch."),
            shape=(3,),
            checksum="",
            nbytes=3 * dtype.itemsize,
        )
        for dtype in DTYPES
    ]
    begin = len(header_of(entries))
    assert begin % 8 == 0
    for each in in_file_order(entries):
        assert begin % getattr(torch, each.dtype).itemsize == 0
        begin += each.nbytes


def manifest(metric: float | None = None) -> Manifest:
    return Manifest(
        step=1, world_size=1, route="flat", created="", versions={}, metric=metric, files={}
    )


def test_names_of_checkpoints() -> None:
    taken = ["step-00000007", "step-00000008", ".tmp-00000009-ab", "step-00000009.bak"]
    assert name_of(9, taken) == "step-00000009"
    assert name_of(123456789012, taken) == "step-123456789012"
    assert name_of(8, taken) == "step-00000008-2"
    assert name_of(3, taken) == "step-00000003-2"  # of a training that has begun again
    taken.append("step-00000003-2")
    assert name_of(3, taken) == "step-00000003-3"
    assert name_of(9, taken) == "step-00000009-2"
    assert order_of("step-00000003-10") > order_of("step-123456789012-2") > order_of(taken[-1])
    assert order_of(taken[-1]) > order_of(taken[1]) > order_of(taken[0]) > order_of(taken[2])


def test_retention_never_removes_the_newest_or_the_best() -> None:
    good = {f"step-{step:08d}": manifest(1 / step) for step in range(1, 6)}
    gone = checkpoints_to_delete(good, [], "step-00000005", keep=1, best=Best("x", "max"))
    assert gone == [f"step-{step:08d}" for step in (2, 3, 4)]
    gone = checkpoints_to_delete(good, [], "step-00000005", keep=2, best=Best("x", "min"))
    assert gone == [f"step-{step:08d}" for step in (1, 2, 3)]
    # A user went back to step 2 and saved 3 again: what comes later does not push it out.
    assert "step-00000003-2" not in checkpoints_to_delete(
        good | {"step-00000003-2": manifest()}, [], "step-00000003-2", keep=1, best=None
    )
    bad = [".tmp-00000005-a", "step-00000001", "step-00000009"]
    gone = checkpoints_to_delete(
        {"step-00000005": manifest()}, bad, "step-00000005", keep=3, best=None
    )
    assert gone == [".tmp-00000005-a", "step-00000001"]


def test_best_has_a_mode() -> None:
    with pytest.raises(UsageError, match="must be 'max' or 'min'"):
        Best("x", "largest")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_loads_what_is_exported_to_dcp(tmp_path: Path) -> None:
    train(tmp_path, 2, 2)

    def rank_main(comm: torchmn.Communicator) -> None:
        saved = torch.nn.Linear(5, 600)
        training = Training(comm)
        checkpointer = checkpointer_of(comm, tmp_path)
        checkpointer.resume(training.state)
        checkpointer.export_dcp(tmp_path / "exported")
        if comm.rank == 0:
            other = torch.nn.Sequential(saved, torch.nn.Tanh(), torch.nn.Linear(600, 3))
            state = {"model": other.state_dict()}
            torch.distributed.checkpoint.load(
                state, checkpoint_id=tmp_path / "exported", no_dist=True
            )
            other.load_state_dict(state["model"])
            assert torch.equal(saved.weight, training.model[0].weight)

    on_ranks(rank_main, 2)
    exported = tmp_path / "exported"
    assert exported.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in exported.iterdir()} == {0o600}
    with pytest.raises(DataError, match=r"manifest.json is missing"):
        export_dcp(tmp_path / "nothing", tmp_path / "x")


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no checkpoint"):
        on_ranks(lambda comm: checkpointer_of(comm, tmp_path).export_dcp(tmp_path / "x"), 2)


def test_a_torch_whose_dcp_cannot_run_on_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6: its functions have no ``no_dist``."""

    def save(state: object, *, storage_writer: object = None) -> None:
        pass

    assert dcp._alone(save) == {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedError, match="on all ranks of the default process group"):
        dcp._alone(save)
