"""Objects between the ranks of a group: sizes, descriptions, tensors, in three rounds.

Every description says which collective its sender is in, so that ranks in different ones learn it
instead of taking one's message for the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators import objects
from torchmn.communicators.group import Group
from torchmn.errors import DisagreementError, UnsupportedError


class Refusal:
    """Sent in place of a value, so that the other ranks learn why none comes."""

    def __init__(self, text: str) -> None:
        self.text = text


class Delivery:
    """Carries objects over a group. Its methods run inside engine jobs."""

    def __init__(self, group: Group, trust: objects.Trust, device: torch.device) -> None:
        self._group = group
        self._trust = trust
        self._device = device

    def deliver(
        self, what: str, outgoing: Mapping[int, object], sources: Sequence[int], tag: int
    ) -> dict[int, Any]:
        """Send ``outgoing[peer]`` to every peer and return one object from every source.

        Three rounds: sizes, descriptions, tensors. The description says which collective the sender
        is in, so that ranks in different ones learn it. Raises UnsupportedError: an object may not
        travel; its receivers get a refusal instead.
        """
        packed: dict[int, objects.Message] = {}  # by identity: often all peers get the same object
        targets: dict[int, objects.Message] = {}
        refusal: UnsupportedError | None = None
        for peer, obj in outgoing.items():
            if peer == self._group.rank:
                continue
            if id(obj) not in packed:
                packed[id(obj)], refusal_here = self._pack(what, obj)
                refusal = refusal or refusal_here
            targets[peer] = packed[id(obj)]
        remote = [peer for peer in sources if peer != self._group.rank]
        sizes = {peer: torch.zeros(1, dtype=torch.int64) for peer in remote}
        self._round(
            what,
            {p: [torch.tensor([len(m.head)])] for p, m in targets.items()},
            {p: [t] for p, t in sizes.items()},
            tag,
        )
        heads = {peer: torch.empty(int(size), dtype=torch.uint8) for peer, size in sizes.items()}
        self._round(
            what,
            {p: [_head_tensor(m)] for p, m in targets.items()},
            {p: [t] for p, t in heads.items()},
            tag,
        )
        described = {
            p: objects.unpack_head(h.numpy().tobytes(), self._device) for p, h in heads.items()
        }
        self._round(
            what,
            {p: m.buffers for p, m in targets.items()},
            {p: [objects.as_bytes(t) for t in d[2]] for p, d in described.items()},
            tag,
        )
        if refusal is not None:
            raise refusal
        result = {peer: self._unpack(what, peer, *described[peer]) for peer in remote}
        if self._group.rank in sources:
            result[self._group.rank] = outgoing[self._group.rank]
        return result

    def _round(
        self,
        what: str,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        tag: int,
    ) -> None:
        """One exchange; CPU and CUDA tensors apart: they may travel by different libraries."""
        for is_cuda in (False, True):
            outgoing = [(p, t) for p, ts in sends.items() for t in ts if t.is_cuda is is_cuda]
            incoming = [(p, t) for p, ts in recvs.items() for t in ts if t.is_cuda is is_cuda]
            if outgoing or incoming:
                self._group.exchange(outgoing, incoming, name=what, tag=tag)

    def broadcast(self, obj: object, root: int) -> Any:
        """Give every rank the root's object. Raises as `deliver`."""
        if self._group.size == 1:
            return obj
        message, refusal = objects.Message(b"", []), None
        if self._group.rank == root:
            message, refusal = self._pack("bcast", obj)
        size = torch.tensor([len(message.head)])
        self._group.broadcast_(size, root)
        head = (
            _head_tensor(message)
            if self._group.rank == root
            else torch.empty(int(size), dtype=torch.uint8)
        )
        self._group.broadcast_(head, root)
        if self._group.rank == root:
            for buffer in message.buffers:
                self._group.broadcast_(buffer, root)
            if refusal is not None:
                raise refusal
            return obj
        note, body, tensors = objects.unpack_head(head.numpy().tobytes(), self._device)
        for tensor in tensors:
            self._group.broadcast_(objects.as_bytes(tensor), root)
        return self._unpack("bcast", root, note, body, tensors)

    def _pack(self, what: str, obj: object) -> tuple[objects.Message, UnsupportedError | None]:
        """A message, and the error to raise once it was delivered if it is a refusal."""
        error = None
        if not isinstance(obj, Refusal):
            try:
                return objects.pack(obj, self._trust, note=what), None
            except UnsupportedError as caught:
                error = caught
        text = obj.text if isinstance(obj, Refusal) else str(error)
        return objects.pack(text, self._trust, note="refused"), error

    def _unpack(self, what: str, peer: int, note: str, body: Any, tensors: list[Tensor]) -> Any:
        if note == what:
            return objects.unpack(body, tensors, self._trust)
        seen = f"refused it: {body}" if note == "refused" else f"is in '{note}'"
        raise DisagreementError(f"{self._group.speaker} is in '{what}', but rank {peer} {seen}")


def _head_tensor(message: objects.Message) -> Tensor:
    return torch.frombuffer(bytearray(message.head), dtype=torch.uint8)
