"""Python objects as messages: a JSON description and the raw bytes of the tensors in them.

Nothing is pickled that JSON can describe. What it cannot describe is pickled only where the
receiver may trust the sender: over MPI, where the ranks of a job are the only peers, or in
messages that carry an HMAC-SHA256 under the secret of the job (``TORCHMN_SECRET``, set by
``torchmn run``). Else it is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmn.errors import CommunicationError, UnsupportedError


@dataclass(frozen=True)
class Trust:
    """Whether and how pickles are accepted."""

    is_private: bool = False
    secret: bytes | None = field(default=None, repr=False)


@dataclass
class Message:
    """``head`` describes the object and ``buffers`` are the tensors in it, flat, as bytes."""

    head: bytes
    buffers: list[Tensor]


def pack(obj: object, trust: Trust, *, note: str = "") -> Message:
    """Turn an object into a message. ``note`` says what the sender is doing.

    Raises UnsupportedError: an object needs pickle and there is no trust.
    """
    buffers: list[Tensor] = []
    body = _describe(obj, buffers, trust)
    return Message(json.dumps([note, body], separators=(",", ":")).encode(), buffers)


def unpack_head(head: bytes, device: torch.device) -> tuple[str, Any, list[Tensor]]:
    """(note, body, empty tensors to receive the buffers into). CUDA tensors go to ``device``."""
    note, body = json.loads(head)
    tensors: list[Tensor] = []
    _allocate(body, tensors, device)
    return note, body, tensors


def unpack(body: Any, tensors: Sequence[Tensor], trust: Trust) -> Any:
    """Build the object again from its description and its tensors."""
    return _build(body, iter(tensors), trust)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor."""
    flat = tensor.reshape(-1)
    if flat.numel() == 1:  # is contiguous whatever its stride, but only stride 1 can be viewed
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def _describe(obj: Any, buffers: list[Tensor], trust: Trust) -> Any:
    """One JSON value: plain values as they are, everything else as [kind, ...]."""
    if obj is None or obj is True or obj is False or type(obj) is str:
        return obj
    if type(obj) is int:
        return obj if abs(obj) < 2**53 else ["int", str(obj)]
    if type(obj) is float:
        return obj if math.isfinite(obj) else ["float", repr(obj)]
    if type(obj) is complex:
        return ["complex", repr(obj.real), repr(obj.imag)]
    if type(obj) is bytes:
        buffers.append(torch.frombuffer(bytearray(obj), dtype=torch.uint8) if obj else _EMPTY)
        return ["bytes", len(obj)]
    if type(obj) in _SEQUENCES.values():
        return [type(obj).__name__, [_describe(item, buffers, trust) for item in obj]]
    if type(obj) in _MAPPINGS.values():  # the state of a model is an OrderedDict
        pairs = [
            [_describe(k, buffers, trust), _describe(v, buffers, trust)] for k, v in obj.items()
        ]
        return [type(obj).__name__, pairs]
    if isinstance(obj, Tensor) and obj.layout == torch.strided and not obj.is_quantized:
        flat = obj.detach().resolve_conj().resolve_neg().contiguous()
        buffers.append(as_bytes(flat))
        return ["tensor", str(obj.dtype).removeprefix("torch."), list(obj.shape), obj.is_cuda]
    if (type(obj) is np.ndarray or isinstance(obj, np.generic)) and _is_plain(obj.dtype):
        array = np.ascontiguousarray(obj)
        kind = "array" if isinstance(obj, np.ndarray) else "scalar"
        buffers.append(torch.from_numpy(np.frombuffer(array.tobytes() or b"", np.uint8).copy()))
        return [kind, array.dtype.str, list(obj.shape)]
    if isinstance(obj, torch.dtype):
        return ["dtype", str(obj).removeprefix("torch.")]
    if isinstance(obj, torch.device):
        return ["device", str(obj)]
    return _pickled(obj, trust)


def _is_plain(dtype: Any) -> bool:
    """Whether ``dtype.str`` says all: not for objects, records and subarrays."""
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None


def _pickled(obj: Any, trust: Trust) -> Any:
    if not trust.is_private and trust.secret is None:
        raise UnsupportedError(
            f"An object of type {type(obj).__qualname__} needs pickle, which this transport "
            "accepts only from peers that know the job's secret. Start the job with 'torchmn run', "
            "or set TORCHMN_SECRET to the same random text on all ranks, or use transport='mpi', "
            "or send numbers, strings, containers and tensors."
        )
    try:
        payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedError(
            f"An object of type {type(obj).__qualname__} cannot be pickled: {error}"
        ) from error
    seal = "" if trust.secret is None else _seal(payload, trust.secret)
    return ["pickle", base64.b64encode(payload).decode(), seal]


def _seal(payload: bytes, secret: bytes) -> str:
    return hmac.new(secret, payload, hashlib.sha256).hexdigest()


def _allocate(body: Any, tensors: list[Tensor], device: torch.device) -> None:
    """Make the tensors that the buffers of this description are received into, in order."""
    if not isinstance(body, list):
        return
    kind = body[0]
    if kind in _SEQUENCES:
        for item in body[1]:
            _allocate(item, tensors, device)
    elif kind in _MAPPINGS:
        for key, value in body[1]:
            _allocate(key, tensors, device)
            _allocate(value, tensors, device)
    elif kind == "bytes":
        tensors.append(torch.empty(body[1], dtype=torch.uint8))
    elif kind == "tensor":
        place = device if body[3] else torch.device("cpu")
        tensors.append(torch.empty(body[2], dtype=getattr(torch, body[1]), device=place))
    elif kind in ("array", "scalar"):
        nbytes = np.dtype(body[1]).itemsize * math.prod(body[2])
        tensors.append(torch.empty(nbytes, dtype=torch.uint8))


def _build(body: Any, tensors: Any, trust: Trust) -> Any:
    if not isinstance(body, list):
        return body
    kind = body[0]
    if kind in _MAPPINGS:
        pairs = [(_build(k, tensors, trust), _build(v, tensors, trust)) for k, v in body[1]]
        return _MAPPINGS[kind](pairs)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_build(item, tensors, trust) for item in body[1])
    if kind == "complex":
        return complex(float(body[1]), float(body[2]))
    if kind == "int":
        return int(body[1])
    if kind == "float":
        return float(body[1])
    if kind == "bytes":
        return next(tensors).numpy().tobytes()
    if kind == "tensor":
        return next(tensors)
    if kind in ("array", "scalar"):
        array = next(tensors).numpy().view(np.dtype(body[1])).reshape(body[2])
        return array if kind == "array" else array[()]
    if kind == "dtype":
        return getattr(torch, body[1])
    if kind == "device":
        return torch.device(body[1])
    payload = base64.b64decode(body[1])
    if not trust.is_private and (
        trust.secret is None or not hmac.compare_digest(_seal(payload, trust.secret), body[2])
    ):
        raise CommunicationError(
            "A pickled message did not carry the seal of this job and was not opened. All ranks "
            "must be started with the same TORCHMN_SECRET."
        )
    return pickle.loads(payload)


_EMPTY = torch.empty(0, dtype=torch.uint8)
_SEQUENCES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)
}
_MAPPINGS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict)}
