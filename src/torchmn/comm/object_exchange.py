"""Objects between all ranks of a group: a check of the call, descriptions, tensors.

The check (see `collective_checks`) compares the calls and carries the sizes of the descriptions, or
the descriptions themselves where they are short. So an object without tensors takes one or two
rounds, one with tensors one more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.comm import object_codec
from torchmn.comm.collective_checks import INLINE_BYTES, Call, CallCheck, Row
from torchmn.comm.group import Group


class ObjectExchange:
    """Sends objects over a group. Its methods are collective and run inside engine jobs.

    Raises from every method: RankMismatchError, the calls of the ranks differ, or a rank rejected
    its own; UnsupportedError, this rank's object cannot be sent.
    """

    def __init__(
        self, group: Group, check: CallCheck, trust: object_codec.Trust, device: torch.device
    ) -> None:
        self._group = group
        self._check = check
        self._trust = trust
        self._device = device

    def exchange(
        self, call: Call, outgoing: Mapping[int, object], sources: Sequence[int]
    ) -> dict[int, Any]:
        """Send ``outgoing[peer]`` to every peer and return one object from every source."""
        own = self._group.rank
        targets = self._pack(call, {p: obj for p, obj in outgoing.items() if p != own})
        remote = [peer for peer in sources if peer != own]
        size, inline = _announced(list(targets.values()))
        rows = self._check.compare(call, size, inline)
        heads = {peer: _empty_head(rows[peer]) for peer in remote}
        sends = {} if inline is not None else {p: [_head(m, size)] for p, m in targets.items()}
        recvs = {p: [head] for p, head in heads.items() if rows[p].inline is None}
        exchange_tensors(self._group, call.name, sends, recvs)
        described = {
            p: object_codec.unpack_head(h.numpy().tobytes(), self._device) for p, h in heads.items()
        }
        exchange_tensors(
            self._group,
            call.name,
            {p: m.buffers for p, m in targets.items()},
            {p: [object_codec.as_bytes(t) for t in d[2]] for p, d in described.items()},
        )
        result = {p: object_codec.unpack(d[1], d[2], self._trust) for p, d in described.items()}
        if own in sources:
            result[own] = outgoing[own]
        return result

    def broadcast(self, call: Call, obj: object, root: int) -> Any:
        """Give every rank the root's object."""
        if self._group.size == 1:
            return obj
        is_root = self._group.rank == root
        messages = list(self._pack(call, {-1: obj}).values()) if is_root else []
        row = self._check.compare(call, *_announced(messages))[root]
        head = _head(messages[0], row.nbytes) if is_root else _empty_head(row)
        if row.inline is None:
            self._group.broadcast_(head, root)
        if is_root:
            for buffer in messages[0].buffers:
                self._group.broadcast_(buffer, root)
            return obj
        _, body, tensors = object_codec.unpack_head(head.numpy().tobytes(), self._device)
        for tensor in tensors:
            self._group.broadcast_(object_codec.as_bytes(tensor), root)
        return object_codec.unpack(body, tensors, self._trust)

    def _pack(self, call: Call, outgoing: Mapping[int, object]) -> dict[int, object_codec.Message]:
        """A message to each peer; peers that get the same object get the same message."""
        packed: dict[int, object_codec.Message] = {}
        try:
            for obj in outgoing.values():
                if id(obj) not in packed:
                    packed[id(obj)] = object_codec.pack(obj, self._trust)
        except Exception as error:
            self._check.reject(call.name, error)
        return {peer: packed[id(obj)] for peer, obj in outgoing.items()}


def exchange_tensors(
    group: Group,
    name: str,
    sends: Mapping[int, Sequence[Tensor]],
    recvs: Mapping[int, Sequence[Tensor]],
    tag: int = 0,
) -> None:
    """One exchange for CPU and one for CUDA tensors, which may use different libraries."""
    for is_cuda in (False, True):
        outgoing = [(p, t) for p, ts in sends.items() for t in ts if t.is_cuda is is_cuda]
        incoming = [(p, t) for p, ts in recvs.items() for t in ts if t.is_cuda is is_cuda]
        if outgoing or incoming:
            group.exchange(outgoing, incoming, name=name, tag=tag)


def _announced(messages: Sequence[object_codec.Message]) -> tuple[int, bytes | None]:
    """For the check: the size of the longest description, and the only one if it is short."""
    size = max((len(message.head) for message in messages), default=0)
    if len({id(message) for message in messages}) == 1 and size <= INLINE_BYTES:
        return size, messages[0].head
    return size, None


def _head(message: object_codec.Message, size: int) -> Tensor:
    """A description as bytes, with blanks up to ``size``, which JSON ignores."""
    return torch.frombuffer(bytearray(message.head.ljust(size)), dtype=torch.uint8)


def _empty_head(row: Row) -> Tensor:
    """The memory that receives the description of this row, or the description itself."""
    if row.inline is not None:
        return torch.frombuffer(bytearray(row.inline), dtype=torch.uint8)
    return torch.empty(row.nbytes, dtype=torch.uint8, device="cpu")
