"""Objects as messages: what is sent without pickle, and which ranks may send pickles."""

from __future__ import annotations

import base64
import json
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchmn.comm import object_codec
from torchmn.comm.object_codec import Trust
from torchmn.errors import CommunicationError, RankMismatchError, UnsupportedError
from torchmn.testing import run_ranks

NO_TRUST = Trust()
CPU = torch.device("cpu")
SECRET = Trust(secret=b"of this job")


class Own:
    """Only pickle can carry it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    __hash__ = None


def carry(obj: object, sender: Trust = NO_TRUST, receiver: Trust = NO_TRUST) -> object:
    """Through a message, as between ranks."""
    message = object_codec.pack(obj, sender, note="n")
    note, body, tensors = object_codec.unpack_head(message.head, torch.device("cpu"))
    assert note == "n"
    assert [t.nbytes for t in tensors] == [b.numel() for b in message.buffers]
    for tensor, buffer in zip(tensors, message.buffers, strict=True):
        object_codec.as_bytes(tensor).copy_(buffer)
    return object_codec.unpack(body, tensors, receiver)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        True,
        -(2**70),
        2**53,
        0.1,
        -0.0,
        float("inf"),
        1 - 2j,
        "",
        'quotes " \\ and \ud800 halves',
        b"",
        b"\x00\xff",
        [],
        (),
        {},
        set(),
        frozenset({1}),
        [["list", [1]], ["tensor", "float32", [2], False]],  # looks like a description
        {(1, 2): {"a": [None, (True,)]}, None: 1, 2.5: {3}},
        torch.Size([2, 3]),
        OrderedDict([("b", 1), ("a", torch.float16)]),
        torch.device("cpu"),
        np.float32(1.5),
        np.bool_(True),
        np.datetime64("2020-01-02"),
    ],
    ids=lambda o: f"{type(o).__name__} {str(o)[:20]!r}",
)
def test_values_keep_value_and_type(obj: object) -> None:
    got = carry(obj)
    assert type(got) is type(obj)
    assert got == obj
    assert repr(got) == repr(obj)


def test_nan_stays_nan() -> None:
    assert np.isnan(carry(float("nan")))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.empty(0, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(6.0)[::2],
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,  # the negative bit
        torch.ones(3).expand(2, 3),
        nn.Parameter(torch.ones(2)),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)} {list(t.stride())}",
)
def test_tensors_of_every_kind_of_memory(tensor: torch.Tensor) -> None:
    got = carry(tensor)
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor.detach().resolve_conj().resolve_neg())
    assert not got.requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.array(5),
        np.zeros((0, 2), np.int8),
        np.array(["a", "bcd"]),
        np.arange(3, dtype=">i4"),
    ],
    ids=lambda a: a.dtype.str,
)
def test_arrays(array: np.ndarray) -> None:
    got = carry(array)
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert (got == array).all()
    if got.size:
        got[...] = got  # may be written to


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, [("a", "i4"), ("b", "f8")]), np.ma.masked_array([1, 2], [True, False])],
    ids=["fields", "masked"],
)
def test_arrays_that_bytes_do_not_describe_are_pickled(array: np.ndarray) -> None:
    with pytest.raises(UnsupportedError, match="needs pickle"):
        carry(array)
    got = carry(array, SECRET, SECRET)
    assert got.dtype == array.dtype
    assert type(got) is type(array)


def test_pickles_need_trust_or_the_secret() -> None:
    with pytest.raises(UnsupportedError) as caught:
        carry(Own(1))
    for part in (
        "The object is an Own, which needs pickle",
        "torchmn run",
        "TORCHMN_SECRET",
        "transport='mpi'",
    ):
        assert part in str(caught.value)
    assert carry([Own(1)], SECRET, SECRET) == [Own(1)]
    private = Trust(is_private=True)
    assert carry(Own(2), private, private) == Own(2)
    assert "of this job" not in repr(SECRET)


@pytest.mark.parametrize("receiver", [Trust(), Trust(secret=b"of another job")])
def test_a_pickle_with_the_wrong_seal_is_not_unpickled(receiver: Trust) -> None:
    with pytest.raises(CommunicationError, match="does not carry the seal of this job"):
        carry(Own(1), SECRET, receiver)


def test_a_modified_pickle_is_not_unpickled() -> None:
    message = object_codec.pack(Own(1), SECRET)
    note, (kind, payload, seal) = json.loads(message.head)
    assert kind == "pickle"
    forged = "A" if payload[10] != "A" else "B"
    with pytest.raises(CommunicationError, match="was not unpickled"):
        object_codec.unpack([kind, payload[:10] + forged + payload[11:], seal], [], SECRET)
    with pytest.raises(CommunicationError, match="was not unpickled"):
        object_codec.unpack([kind, payload, ""], [], SECRET)
    assert object_codec.unpack([kind, payload, seal], [], SECRET) == Own(1)


class MaliciousPickle:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("trust", [Trust(), SECRET], ids=["none", "secret"])
@pytest.mark.parametrize("seal", ["", "0" * 64, None, 7, "ü"])
def test_nothing_without_the_seal_is_unpickled(tmp_path: Path, trust: Trust, seal: object) -> None:
    payload = base64.b64encode(pickle.dumps(MaliciousPickle(tmp_path / "executed"))).decode()
    bodies = [["pickle", payload, seal], ["list", [["pickle", payload, seal]]]]
    bodies += [["dict", [[1, ["pickle", payload, seal]]]], ["PICKLE", payload, seal]]
    for body in bodies:
        with pytest.raises(CommunicationError):
            object_codec.unpack(body, [], trust)
    assert not (tmp_path / "executed").exists()
    own = Trust(is_private=True)
    carry(MaliciousPickle(tmp_path / "executed"), own, own)  # the pickle does what it should
    assert (tmp_path / "executed").exists()


def test_ranks_do_not_unpickle_from_a_rank_without_the_secret(tmp_path: Path) -> None:
    """Like a client that has joined gloo: it sends a pickle without the seal."""

    def rank_main(comm):
        if comm.rank == 1:
            comm._jobs.objects._trust = Trust(secret=b"a guess")
        try:
            comm.gather_obj(MaliciousPickle(tmp_path / "executed") if comm.rank else 1)
        except CommunicationError as error:
            return str(error)
        return ""

    first, _ = run_ranks(rank_main, 2, is_trusted=False)
    assert "does not carry the seal of this job" in first
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["load", "__name__", "nn", "no such"])
def test_names_of_dtypes_lead_to_dtypes_only(name: str) -> None:
    for body in (["dtype", name], ["list", [["dtype", name]]]):
        with pytest.raises(CommunicationError, match="is not a dtype"):
            object_codec.unpack(body, [], Trust())
    with pytest.raises(CommunicationError, match="is not a dtype"):
        object_codec.unpack_head(json.dumps(["", ["tensor", name, [1], False]]).encode(), CPU)


def test_arrays_of_pointers_are_rejected() -> None:
    for dtype in ("|O", "O", "|O8", "f4,f4"):
        with pytest.raises(CommunicationError, match="cannot be read"):
            object_codec.unpack_head(json.dumps(["", ["array", dtype, [1]]]).encode(), CPU)


def test_errors_of_a_trusted_class_are_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        carry([Grumpy()], SECRET, SECRET)


class Grumpy:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return divmod, (1, 0)


def test_ranks_that_know_the_secret_exchange_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_SECRET", "random text")

    def rank_main(comm):
        return comm.allgather_obj(Own(comm.rank))

    for got in run_ranks(rank_main, 2, is_trusted=False):
        assert got == [Own(0), Own(1)]


WAYS = {
    "allgather": lambda comm, obj: comm.allgather_obj(obj),
    "bcast": lambda comm, obj: comm.bcast_obj(obj, root=1),
    "gather": lambda comm, obj: comm.gather_obj(obj, root=0),
    "scatter": lambda comm, obj: comm.scatter_obj([obj] * 3 if comm.rank == 1 else None, root=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rejected_object_raises_on_all_ranks(way: str) -> None:
    """Rank 1 alone has an object that may not travel; the others do not wait for the limit."""

    def rank_main(comm):
        try:
            WAYS[way](comm, Own(1) if comm.rank == 1 else comm.rank)
        except (UnsupportedError, RankMismatchError) as error:
            refusal = error
        else:
            refusal = None
        comm.barrier()  # all are still together
        return refusal

    first, second, third = run_ranks(rank_main, 3, is_trusted=False)
    assert isinstance(second, UnsupportedError)
    assert "needs pickle" in str(second)
    for error in (first, third):
        assert isinstance(error, RankMismatchError)
        assert "rank 1 rejected it: The object is an Own, which needs pickle" in str(error)


def test_a_single_rank_keeps_its_objects() -> None:
    """Nothing travels, so nothing must be able to."""

    def rank_main(comm):
        function = lambda: 1  # noqa: E731
        assert comm.allgather_obj(function) == [function]
        assert comm.bcast_obj(function) is function
        assert comm.gather_obj(function) == [function]
        assert comm.scatter_obj([function]) is function

    run_ranks(rank_main, 1, is_trusted=False)
