"""Python objects as messages: a JSON description and the raw bytes of the tensors in them.

Built-in values, dataclasses, NamedTuples and Enums are not pickled (`object_kinds`). Other objects
are pickled only if the receiver can trust the sender: over MPI, where only the ranks of the job are
peers, or with a seal, the HMAC-SHA256 of the message under the secret of the job
(``TORCHMN_SECRET``, set by ``torchmn run``). Otherwise they are rejected. Only a trusted sender can
make a receiver import a module. Checkpoints contain the same descriptions (`describe`, `build`),
but no objects of classes and no pickles.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import importlib
import json
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.base.errors import CommunicationError, DataError, UnsupportedError
from torchmn.comm import object_kinds
from torchmn.comm.local_tensors import describe_part, is_distributed
from torchmn.comm.object_kinds import torch_dtype

_MAX_DEPTH = 200
"""The limit of nested containers: the receiver needs a few Python stack frames for each."""


@dataclass(frozen=True)
class Trust:
    """The condition under which pickles and names of modules are accepted.

    ``is_private``: only ranks of the job can connect. ``secret``: the secret of the job, or None.
    """

    is_private: bool = False
    secret: bytes | None = field(default=None, repr=False)

    def seal(self, payload: bytes) -> str:
        """The HMAC of a payload under the job's secret, as text; empty without a secret."""
        return hmac.new(self.secret, payload, hashlib.sha256).hexdigest() if self.secret else ""

    def accepts(self, payload: bytes, seal: str) -> bool:
        """Whether a payload is known to come from a rank of this job."""
        # Compared in constant time: the time of `==` would tell how much of a forged seal is right.
        is_sealed = bool(self.secret) and hmac.compare_digest(self.seal(payload), seal)
        return self.is_private or is_sealed


@dataclass
class Message:
    """A packed object: its description ``head``, and the bytes of its tensors, ``buffers``."""

    head: bytes
    buffers: list[Tensor]


Path = tuple[str, ...]
"""The place of a value in an object: keys, positions and ``.name`` of attributes, from the root."""


@dataclass(frozen=True)
class Part:
    """A tensor of an object and its place in the object: ``("'optimizer'", "0")``."""

    path: Path
    tensor: Tensor


def pack(obj: object, trust: Trust, *, note: str = "") -> Message:
    """Pack an object into a message. ``note`` is sent with it.

    Raises UnsupportedError: something in it needs pickle, which ``trust`` does not allow, or cannot
    be sent at all; the message names its place, such as ``The object['lr'][0]``.
    """
    parts: list[Part] = []
    body = _describe(obj, parts, trust, ("The object",))
    buffers = [as_bytes(part.tensor.contiguous()) for part in parts]
    return Message(json.dumps([note, body], separators=(",", ":")).encode(), buffers)


def describe(obj: object, root: str = "state") -> tuple[Any, list[Part]]:
    """Describe an object by a JSON value and a list of its tensors. Never pickles. Local.

    The tensors share the object's memory and may have any strides. A DTensor is replaced by this
    rank's part, see `describe_part`. Raises UnsupportedError: something in it is not a plain value;
    the message names its place, such as ``state['scheduler'][0]``.
    """
    parts: list[Part] = []
    return _describe(obj, parts, None, (root,)), parts


def build(body: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuild an object from the results of `describe`. Local.

    Raises DataError: ``body`` is not a description, or does not match the tensors.
    """
    waiting = iter(tensors)
    try:
        obj = _build(body, waiting, None)
    except _DESCRIPTION_ERRORS as error:
        raise DataError(f"not a description of a state: {type(error).__name__}: {error}") from error
    if next(waiting, None) is not None:
        raise DataError("the description of a state has fewer tensors than were saved with it.")
    return obj


def unpack_head(head: bytes, device: torch.device) -> tuple[str, Any, list[Tensor]]:
    """Parse a description; returns the note, the body, and empty tensors for the buffers.

    CUDA tensors are allocated on ``device``. Raises CommunicationError: ``head`` is not a
    description.
    """
    try:
        note, body = json.loads(head)
        return note, body, [_allocate(kind, device) for kind in kinds_of(body)]
    except _DESCRIPTION_ERRORS as error:
        raise _not_ours(error) from error


def unpack(body: Any, tensors: Sequence[Tensor], trust: Trust) -> Any:
    """Rebuild an object from its description and its tensors.

    Raises CommunicationError: ``body`` is not a description, or contains an untrusted pickle.
    """
    try:
        return _build(body, iter(tensors), trust)
    except _PickleError as carrier:
        raise carrier.error from None
    except _DESCRIPTION_ERRORS as error:
        raise _not_ours(error) from error


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor."""
    flat = tensor.reshape(-1)
    if flat.numel() == 1:  # contiguous with any stride, but view(dtype) needs stride 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


class _PickleError(Exception):
    """Carries an error raised while unpickling, so that `unpack` raises it unchanged."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _not_ours(error: Exception) -> CommunicationError:
    return CommunicationError(
        f"A message cannot be read ({type(error).__name__}: {error}): its sender is not a rank of "
        "this job, or runs another version of torchmn."
    )


def _describe(obj: Any, parts: list[Part], trust: Trust | None, path: Path) -> Any:
    """The JSON value for an object: plain values unchanged, everything else as [kind, ...]."""
    if obj is None or obj is True or obj is False or type(obj) is str:
        return obj
    kind = type(obj)
    if (kind is int and abs(obj) < 2**53) or (kind is float and math.isfinite(obj)):
        return obj
    if len(path) > _MAX_DEPTH:
        raise UnsupportedError(
            f"{place(path[:4])} contains itself, or more than {_MAX_DEPTH} containers within each "
            "other, and is neither sent nor saved. Leave out what refers back, such as a parent."
        )
    if kind in object_kinds.PARTS:
        values = object_kinds.PARTS[kind](obj)
        return [kind.__name__, *(_describe(value, parts, trust, path) for value in values)]
    if kind is bytes:
        flat = torch.frombuffer(bytearray(obj), dtype=torch.uint8) if obj else _EMPTY
        parts.append(Part(path, flat))
        return ["bytes", len(obj)]
    if kind in _SEQUENCES.values():
        items = [_describe(x, parts, trust, (*path, str(i))) for i, x in enumerate(obj)]
        return [kind.__name__, items]
    if kind in _MAPPINGS.values():  # the state of a model is an OrderedDict
        at = ".{}".format if kind is object_kinds.Attributes else repr
        pairs = [
            [_describe(k, parts, trust, (*path, "key")), _describe(v, parts, trust, (*path, at(k)))]
            for k, v in obj.items()
        ]
        return [kind.__name__, pairs]
    if kind is type and obj in object_kinds.FACTORIES.values():
        return ["type", obj.__name__]
    if trust is None and is_distributed(obj):
        return _describe(describe_part(obj), parts, trust, path)
    if isinstance(obj, Tensor) and _is_dense(obj) and (trust or type(obj) in _TENSORS):
        # Lazy conjugation and negation are flags of a tensor that its memory does not show.
        parts.append(Part(path, obj.detach().resolve_conj().resolve_neg()))
        return ["tensor", str(obj.dtype).removeprefix("torch."), list(obj.shape), obj.is_cuda]
    if (type(obj) is np.ndarray or isinstance(obj, np.generic)) and _is_plain(obj.dtype):
        array = np.ascontiguousarray(obj)
        name = "array" if isinstance(obj, np.ndarray) else "scalar"
        # Copied, because memory of a bytes object is read-only, and torch has no such tensors.
        flat = torch.from_numpy(np.frombuffer(array.tobytes() or b"", np.uint8).copy())
        parts.append(Part(path, flat))
        return [name, array.dtype.str, list(obj.shape)]
    if trust is None:
        raise UnsupportedError(
            f"{place(path)} is {_kind(obj)}. Only Python's own values (numbers, text, paths, "
            "containers), dense tensors and arrays are saved: nothing in a checkpoint is pickled."
        )
    if object_kinds.is_rebuilt(kind):
        held = _describe(object_kinds.content(obj), parts, trust, path)
        return ["object", *_class_name(obj, trust, path), held]
    return _pickled(obj, trust, path)


def _class_name(obj: Any, trust: Trust, path: Path) -> tuple[str, str, str]:
    """The module and qualified name of a class, and the seal that permits to import the module."""
    cls = type(obj)
    # In a child of multiprocessing (spawn) the main script is in sys.modules under both names.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    if object_kinds.find_class(module, cls.__qualname__) is not cls:
        raise UnsupportedError(
            f"{place(path)} is {_kind(obj)}, a class that other ranks cannot find: there is no "
            f"{cls.__qualname__} in the module {module}. Define it at the top level of the script "
            "or of a module, not in a function or a notebook, or send a dict of its fields."
        )
    return module, cls.__qualname__, trust.seal(module.encode())


def place(path: Path) -> str:
    """A path as a Python expression: ``state['scheduler']['lr_lambdas'][0]``."""
    root, *keys = path
    return root + "".join(key if key.startswith(".") else f"[{key}]" for key in keys)


def _kind(obj: Any) -> str:
    if type(obj) in _TENSORS:
        return f"a tensor of layout {obj.layout}, dtype {obj.dtype} on {obj.device}"
    if type(obj) is np.ndarray:
        return f"an array of dtype {obj.dtype}"
    name = type(obj).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_dense(tensor: Tensor) -> bool:
    """Whether dtype, shape and memory describe a tensor completely."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _is_plain(dtype: Any) -> bool:
    """Whether ``dtype.str`` describes a dtype: not for objects, records and subarrays."""
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None


def _pickled(obj: Any, trust: Trust, path: Path) -> Any:
    if not trust.is_private and trust.secret is None:
        raise UnsupportedError(
            f"{place(path)} is {_kind(obj)}, which needs pickle, and this transport accepts that "
            "only from peers that know the job's secret. Send what it holds as numbers, text, "
            "tensors, containers, dataclasses or Enums, or start the job with 'torchmn run', or "
            "set TORCHMN_SECRET to the same random text on all ranks, or use transport='mpi'."
        )
    try:
        # pickle calls methods of the object, which may raise anything.
        payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedError(
            f"{place(path)} is {_kind(obj)} and cannot be pickled: {error}. Leave it out, or send "
            "what makes it again, such as a path, a state_dict() or its arguments."
        ) from error
    return ["pickle", base64.b64encode(payload).decode(), trust.seal(payload)]


def kinds_of(body: Any) -> Iterator[Any]:
    """Yield the entries of a description that have a buffer, in order: ``["tensor", ...]`` etc."""
    if not isinstance(body, list):
        return
    kind, *items = body
    if kind in ("bytes", "tensor", "array", "scalar"):
        yield body
        return
    if kind in _SEQUENCES or kind in _MAPPINGS:
        items = items[0] if kind in _SEQUENCES else [each for pair in items[0] for each in pair]
    for item in items:
        yield from kinds_of(item)


def _allocate(kind: Any, device: torch.device) -> Tensor:
    """An empty tensor for the buffer of an entry of a description."""
    if kind[0] == "bytes":
        return torch.empty(kind[1], dtype=torch.uint8, device="cpu")
    if kind[0] == "tensor":
        # On the receiver's GPU, whatever number the sender's has.
        home = device if kind[3] else torch.device("cpu")
        return torch.empty(kind[2], dtype=torch_dtype(kind[1]), device=home)
    nbytes = _plain_dtype(kind[1]).itemsize * math.prod(kind[2])
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _build(body: Any, tensors: Any, trust: Trust | None) -> Any:
    if not isinstance(body, list):
        return body
    kind = body[0]
    if kind in _MAPPINGS:
        pairs = [(_build(k, tensors, trust), _build(v, tensors, trust)) for k, v in body[1]]
        return _MAPPINGS[kind](pairs)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_build(item, tensors, trust) for item in body[1])
    if kind in object_kinds.MAKE:
        return object_kinds.MAKE[kind](*(_build(part, tensors, trust) for part in body[1:]))
    if kind == "type":
        return object_kinds.FACTORIES[body[1]]
    if kind == "bytes":
        return next(tensors).numpy().tobytes()
    if kind == "tensor":
        return next(tensors)
    if kind in ("array", "scalar"):
        array = next(tensors).numpy().view(_plain_dtype(body[1])).reshape(body[2])
        return array if kind == "array" else array[()]
    if kind == "object" and trust is not None:
        return object_kinds.rebuild(_class_of(trust, *body[1:4]), _build(body[4], tensors, trust))
    if kind != "pickle" or trust is None:
        raise ValueError(f"{kind!r} is not a kind of value that may be read here")
    payload = base64.b64decode(body[1])
    if not trust.accepts(payload, body[2]):
        raise CommunicationError(
            "A pickled message does not carry the seal of this job and was not unpickled. Start "
            "all ranks with the same TORCHMN_SECRET."
        )
    try:
        return pickle.loads(payload)
    except Exception as error:
        raise _PickleError(error) from error


def _class_of(trust: Trust, module: str, qualname: str, seal: str) -> Any:
    # Importing a module runs its code, so the sender must be trusted.
    if module not in sys.modules and trust.accepts(module.encode(), seal):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = object_kinds.find_class(module, qualname)
    if found is None:
        raise CommunicationError(
            f"An object of the class {qualname} of {module} has arrived, which this rank has not "
            "imported. Define the class at the top level of the script or of a module that all "
            "ranks import before, or send a dict of its fields."
        )
    return found


def _plain_dtype(text: str) -> Any:
    """A dtype from its text. Raises ValueError unless `_is_plain`: objects would be pointers."""
    if not re.fullmatch(r"[<>|=][A-Za-z][0-9]{0,9}(\[\w+\])?", text):
        raise ValueError(f"{text!r} is not a plain dtype of numpy")
    dtype = np.dtype(text)
    if not _is_plain(dtype):
        raise ValueError(f"{text!r} is not a plain dtype of numpy")
    return dtype


_TENSORS = (Tensor, nn.Parameter)
"""Types sent as plain tensors. Subclasses may hold a part of a tensor, or no memory."""
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
_SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)
}
_MAPPINGS: dict[str, Any] = {
    kind.__name__: kind for kind in (dict, OrderedDict, object_kinds.Attributes)
}
_DESCRIPTION_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, StopIteration),
)
"""Errors of the functions above for malformed descriptions, which `pack` does not make."""
