"""Saving and resuming: bit-identical, asynchronous, on all ranks."""

import shutil
import threading
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests.limits import limit
from tests.unit.checkpoint.training import (
    Holder,
    Training,
    assert_same,
    checkpointer_of,
    names,
    on_ranks,
    saved,
    train,
)
from torchmn.checkpoint import Best
from torchmn.errors import (
    CheckpointWarning,
    CommunicationError,
    DataError,
    RankMismatchError,
    UnsupportedError,
    UsageError,
)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_resumed_run_is_bit_equal(tmp_path: Path, num_ranks: int, is_async: bool) -> None:
    whole = train(tmp_path / "whole", num_ranks, 6, is_async=is_async)
    train(tmp_path / "parts", num_ranks, 3, is_async=is_async)
    parts = train(tmp_path / "parts", num_ranks, 6, is_async=is_async)
    assert [start for start, _ in parts] == [3] * num_ranks
    assert_same(parts, whole)


def test_nothing_there_is_step_0(tmp_path: Path) -> None:
    assert [start for start, _ in train(tmp_path, 2, 0)] == [0, 0]
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["with space", "dots.1.2", "Ünïcode-模型", "-x", "a~b%20"])
def test_names(tmp_path: Path, name: str) -> None:
    def rank_main(comm: torchmn.Communicator) -> int:
        path = tmp_path / "päth with. all"
        model = nn.Linear(2, 2)
        checkpointer = torchmn.create_multi_node_checkpointer(comm, path, name)
        checkpointer.save(7, {"model": model})
        checkpointer.finish()
        assert (path / name / "step-00000007" / "manifest.json").exists()
        return int(checkpointer.resume({"model": model}))

    assert on_ranks(rank_main, 2) == [7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"name": each}, "the name of a folder") for each in ("a/b", "/", "", ".", "..", "a\0b")],
        ({"keep": 0}, "keep=0"),
        ({"best": "accuracy"}, "must be a torchmn.checkpoint.Best"),
        ({"on_failure": "ignore"}, "on_failure='ignore'"),
        ({"check_replicas": "maybe"}, "check_replicas='maybe'"),
    ],
)
def test_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = {"name": "a run", **options}
    with pytest.raises(UsageError, match=message):
        on_ranks(lambda c: torchmn.create_multi_node_checkpointer(c, tmp_path, **given), 1)


def test_ranks_with_different_arguments(tmp_path: Path) -> None:
    with pytest.raises(RankMismatchError, match="different keep: rank 0: 1; rank 1: 2"):
        on_ranks(lambda c: checkpointer_of(c, tmp_path, keep=1 + c.rank), 2)


def test_every_plain_value_survives(tmp_path: Path) -> None:
    state = {
        0: "int key",
        "0": "text key",
        (1, "a"): 2**80,
        "-": [-(2**64), 2**53 + 1, True, None, float("inf"), float("-inf"), -0.0, 1e-320, 1 - 2j],
        "bytes": [b"", b"\x00\xff"],
        "sets": [{1, 2}, frozenset({"x"})],
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "ordered": OrderedDict(b=1, a=2),
        "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.arange(6.0).reshape(2, 3)],
        "empty": [torch.empty(0, 3), np.empty((2, 0)), [], (), {}],
        "/slash": {"~tilde": torch.tensor([1])},
        "scalars": [torch.tensor(3), torch.tensor(2.5, dtype=torch.float16)],
        "dtypes": [
            torch.ones(3).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64,
                          torch.complex64, torch.complex128, torch.float8_e4m3fn)
        ],
        "strided": [torch.ones(3, 4).t(), torch.arange(6)[::2], torch.ones(1).expand(5)],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
        "surrogate": "\ud800 and \"",
    }  # fmt: skip

    def rank_main(comm: torchmn.Communicator) -> Any:
        checkpointer = saved(comm, tmp_path, 1, {"all": Holder(state), "nan": Holder(float("nan"))})
        back, nan = Holder(), Holder()
        checkpointer.resume({"all": back, "nan": nan})
        assert nan.state != nan.state
        return back.state

    for back in on_ranks(rank_main, 2):
        assert_equal(back, state)


def assert_equal(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.tolist() == theirs.tolist()
    elif isinstance(theirs, (np.ndarray, np.generic)):
        assert type(mine) is type(theirs)
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    else:
        assert type(mine) is type(theirs)
        if isinstance(theirs, dict):
            assert list(mine) == list(theirs)
            for key in theirs:
                assert_equal(mine[key], theirs[key])
        elif isinstance(theirs, (list, tuple)):
            assert len(mine) == len(theirs)
            for a, b in zip(mine, theirs, strict=True):
                assert_equal(a, b)
        else:
            assert repr(mine) == repr(theirs)


class Odd(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr_lambdas": [lambda epoch: 1]}, r"state\['it'\]\['lr_lambdas'\]\[0\] is a function"),
        ([0, (1, SimpleNamespace())], r"state\['it'\]\[1\]\[1\] is a SimpleN"),
        ({1: Odd()}, r"state\['it'\]\[1\] is an Odd"),
        (torch.ones(2).to_sparse(), r"state\['it'\] is a tensor of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (np.array([None]), "an array of dtype object"),
        ({lambda: 1: 2}, r"state\['it'\]\[key\] is a function"),
    ],
)
def test_what_would_need_pickle_is_named(tmp_path: Path, state: Any, message: str) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = checkpointer_of(comm, tmp_path)
        with pytest.raises(UnsupportedError, match=message):
            checkpointer.save(1, {"it": Holder(state)})
        checkpointer.finish()

    on_ranks(rank_main, 2)
    assert names(tmp_path) == []


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("step", "state", "error", "message"),
    [
        (1, {"it": Holder(ITSELF)}, UnsupportedError, "contains itself"),
        (1, {"lr": 0.1}, UsageError, r"state\['lr'\] is a float"),
        *[(step, {}, UsageError, "step=") for step in (-1, 1.0, True, None)],
    ],
    ids=["itself", "no state", "below 0", "float", "bool", "none"],
)
def test_what_cannot_be_saved(
    tmp_path: Path, step: Any, state: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        on_ranks(lambda c: checkpointer_of(c, tmp_path).save(step, state), 1)


def test_error_on_one_rank_gives_the_checkpoint_up_on_all(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = checkpointer_of(comm, tmp_path)
        state = {"it": Holder(print if comm.rank == 1 else 5)}
        if comm.rank == 1:
            with pytest.raises(UnsupportedError):
                checkpointer.save(1, state)
            return ""
        checkpointer.save(1, state)
        with pytest.raises(DataError) as caught:
            checkpointer.finish()
        return str(caught.value)

    messages = on_ranks(rank_main, 3)
    assert "rank 1 of 3" in messages[0]
    assert "is a builtin_function_or_method" in messages[2]
    assert names(tmp_path) == []


def test_a_metric_that_is_no_number_gives_the_checkpoint_up_on_all(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = checkpointer_of(comm, tmp_path)
        state = {"it": Holder(5)}
        if comm.rank == 0:
            with pytest.raises(ValueError, match="one element"):
                checkpointer.save(1, state, metric=torch.zeros(2))
        else:
            checkpointer.save(1, state)
        with nullcontext() if comm.rank == 0 else pytest.raises(DataError, match="one element"):
            checkpointer.finish()
        checkpointer.save(2, state)
        checkpointer.finish()

    on_ranks(rank_main, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_an_error_while_reading_is_raised_on_all(tmp_path: Path) -> None:
    import torch.distributed.tensor  # the state is asked for where its parts go

    assert torch.distributed.tensor

    class Fragile(Holder):
        is_broken = False

        def state_dict(self) -> Any:
            if self.is_broken:
                raise RuntimeError("not ready before the first step")
            return super().state_dict()

    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer, it = checkpointer_of(comm, tmp_path), Fragile(5)
        checkpointer.save(1, {"it": it})
        checkpointer.finish()
        it.is_broken = comm.rank == 1
        with pytest.raises(RuntimeError if comm.rank == 1 else UsageError, match="not ready"):
            checkpointer.resume({"it": it})

    on_ranks(rank_main, 2)


def test_ranks_at_different_steps(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = checkpointer_of(comm, tmp_path)
        checkpointer.save(5 + comm.rank, {"it": Holder(1)})
        with pytest.raises(DataError, match=r"different steps: \[5, 6\]"):
            checkpointer.finish()

    on_ranks(rank_main, 2)


def paused(checkpointer: Any) -> threading.Event:
    """Let nothing be written before the event."""
    may_write, write = threading.Event(), checkpointer._writer.write
    checkpointer._writer.write = lambda request: (may_write.wait(limit(9)), write(request))[1]
    return may_write


def test_what_training_changes_meanwhile_is_not_saved(tmp_path: Path) -> None:
    """The files are written while the tensors already have other values."""

    def rank_main(comm: torchmn.Communicator) -> float:
        model = nn.Linear(300, 300)
        with torch.no_grad():
            model.weight.fill_(1.0)
        checkpointer = checkpointer_of(comm, tmp_path)
        may_write = paused(checkpointer)
        checkpointer.save(1, {"model": model})
        with torch.no_grad():
            model.weight.fill_(2.0)
        may_write.set()
        checkpointer.finish()
        checkpointer.resume({"model": model})
        return float(model.weight.detach().sum()) / model.weight.numel()

    assert on_ranks(rank_main, 2) == [1.0, 1.0]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> str:
        holder = Holder(1)
        checkpointer = checkpointer_of(comm, tmp_path)
        may_write = paused(checkpointer)
        checkpointer.save(1, {"it": holder})
        opener = threading.Timer(0.3, may_write.set)
        opener.start()
        checkpointer.save(2, {"it": holder})
        assert may_write.is_set(), "the second save did not wait"
        checkpointer.finish()
        opener.join()
        return checkpointer.get_stats()

    for stats in on_ranks(rank_main, 2):
        assert stats.startswith("Snapshot duration stats (sec): avg=")
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_was_saved_last_is_resumed(tmp_path: Path) -> None:
    """Also by a run that began again without `resume` and has made fewer steps."""

    def rank_main(comm: torchmn.Communicator) -> tuple[int, Any]:
        for name, steps in (("first run", (10, 20, 30)), ("second run", (5, 15))):
            checkpointer = checkpointer_of(comm, tmp_path, keep=2)
            for step in steps:
                checkpointer.save(step, {"it": Holder(f"{name}, {step}")})
            checkpointer.finish()
            checkpointer.close()
        holder = Holder()
        return checkpointer_of(comm, tmp_path).resume({"it": holder}), holder.state

    assert on_ranks(rank_main, 2) == [(15, "second run, 15")] * 2
    assert names(tmp_path) == ["step-00000005-2", "step-00000015-2"]


def test_two_objects_do_not_share_memory_after_loading(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> tuple[int, int]:
        tensor = torch.ones(4)
        checkpointer = saved(
            comm, tmp_path, 1, {"a": Holder(tensor), "b": Holder([tensor, tensor])}
        )
        a, b = Holder(), Holder()
        checkpointer.resume({"a": a, "b": b})
        assert torch.equal(b.state[1], tensor)
        return len({a.state.data_ptr(), *(t.data_ptr() for t in b.state)}), 3

    assert on_ranks(rank_main, 1) == [(3, 3)]


def test_other_names_of_objects(tmp_path: Path) -> None:
    train(tmp_path, 2, 1)

    def rank_main(comm: torchmn.Communicator) -> None:
        training = Training(comm)
        checkpointer = checkpointer_of(comm, tmp_path)
        with pytest.raises(UsageError, match="without ema; it has model, optimizer, scheduler"):
            checkpointer.resume({**training.state, "ema": Holder()})
        assert checkpointer.resume({"model": training.model}) == 1

    with pytest.warns(CheckpointWarning, match="also has optimizer, scheduler"):
        on_ranks(rank_main, 2)


def test_an_object_that_refuses_its_state(tmp_path: Path) -> None:
    class Refusing(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not this one")

    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = saved(comm, tmp_path, 1, {"it": Holder(1)})
        error = ValueError if comm.rank == 1 else CommunicationError
        message = "not this one" if comm.rank == 1 else "rank 1 could not load"
        with pytest.raises(error, match=message):
            checkpointer.resume({"it": Refusing() if comm.rank == 1 else Holder()})

    on_ranks(rank_main, 2)


def test_keep_and_best(tmp_path: Path) -> None:
    accuracies = [0.1, 0.9, 0.2, float("nan"), None, 0.3]

    def rank_main(comm: torchmn.Communicator) -> None:
        checkpointer = checkpointer_of(comm, tmp_path, keep=2, best=Best("accuracy", "max"))
        for step, accuracy in enumerate(accuracies, 1):
            metric = accuracy if accuracy is None else torch.tensor(accuracy)
            checkpointer.save(step, {"it": Holder(step)}, metric=metric)
        checkpointer.finish()

    on_ranks(rank_main, 2)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]


def test_closing_finishes_what_is_being_written(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> Any:
        checkpointer = checkpointer_of(comm, tmp_path)
        checkpointer.save(1, {"it": Holder(comm.rank)})
        return checkpointer  # run_ranks finalizes the communicator

    checkpointers = on_ranks(rank_main, 3)
    assert names(tmp_path) == ["step-00000001"]
    for checkpointer in checkpointers:
        with pytest.raises(UsageError, match="was closed"):
            checkpointer.save(2, {})


def test_lost_rank_ends_a_save_with_an_error(tmp_path: Path) -> None:
    """Rank 1 never reaches the round: a waiting rank is released when it closes."""

    def rank_main(comm: torchmn.Communicator) -> str:
        checkpointer = checkpointer_of(comm, tmp_path)
        if comm.rank == 1:
            return ""
        checkpointer.save(1, {"it": Holder(1)})
        with pytest.raises(CommunicationError) as caught:
            checkpointer.finish()
        with pytest.raises(CommunicationError, match="after a rank was lost"):
            checkpointer.save(2, {"it": Holder(1)})
        return str(caught.value)

    assert "another rank was lost while a checkpoint was begun" in on_ranks(rank_main, 2)[0]


def test_ranks_that_do_not_share_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real with mount namespaces: tests/all/processes/test_checkpoint.py."""
    from torchmn.checkpoint import create

    monkeypatch.setattr(create, "_sees", lambda token, comm: comm.rank != 1)
    with pytest.raises(UnsupportedError, match=r"ranks \[1\] on localhost do not see"):
        on_ranks(lambda c: checkpointer_of(c, tmp_path), 2)


def test_folder_may_move(tmp_path: Path) -> None:
    whole = train(tmp_path / "one", 2, 4)
    train(tmp_path / "two", 2, 2)
    shutil.move(tmp_path / "two", tmp_path / "three")
    assert_same(train(tmp_path / "three", 2, 4), whole)
