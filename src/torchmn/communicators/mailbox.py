"""Messages from one rank to another, which only these two take part in.

A message begins with an envelope of `ENVELOPE_BYTES`: its tag, the size of its description, and
the description itself where it is short. Envelopes of all tags come in one order per sender; what
the receiver did not ask for waits in its mailbox until it does. That is what lets it ask for a
message of any tag, and of any source.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchmn.communicators import object_codec
from torchmn.communicators.group import Group
from torchmn.communicators.object_exchange import exchange_tensors
from torchmn.errors import CommunicationError, RankMismatchError, UsageError

ANY_SOURCE = -1
"""As ``source`` of `recv` and `recv_obj`: from whichever rank a message comes first."""
ANY_TAG = -1
"""As ``tag`` of `recv` and `recv_obj`: whichever tag it has."""

ENVELOPE_BYTES = 256
_HEAD = struct.Struct("<qBq")  # tag, state, bytes of the description
_INLINE_BYTES = ENVELOPE_BYTES - _HEAD.size
_PLAIN, _INLINE = range(2)
_REFUSED = "refused"
_ENVELOPE_TAG = 64  # of the transport; collectives use 0
_BODY_TAG = 65


class HasStatus(Protocol):
    """What is told about a message: `Status`, or ``mpi4py.MPI.Status``."""

    source: Any
    tag: Any


@dataclass
class Status:
    """Where a message came from, filled by ``recv(..., status=status)``. Local.

    ``source`` and ``tag`` are `ANY_SOURCE` and `ANY_TAG` before that.
    """

    source: int = ANY_SOURCE
    tag: int = ANY_TAG


@dataclass(frozen=True)
class _Letter:
    """A message that has arrived and that nobody has asked for yet."""

    source: int
    tag: int
    note: str
    body: Any
    tensors: list[Tensor]


class Mailbox:
    """Point-to-point messages of one rank. Its methods run inside engine jobs."""

    def __init__(self, group: Group, trust: object_codec.Trust, device: torch.device) -> None:
        self._group = group
        self._trust = trust
        self._device = device
        self._arrived: list[_Letter] = []

    def send(self, obj: object, dest: int, tag: int) -> None:
        """Send an object. Called by the sender.

        Where it may not travel the receiver gets the reason instead, and both raise.
        """
        refusal = None
        try:
            message = object_codec.pack(obj, self._trust)
        except Exception as error:
            refusal = error
            message = object_codec.pack(str(error), self._trust, note=_REFUSED)
        is_inline = len(message.head) <= _INLINE_BYTES
        envelope = bytearray(ENVELOPE_BYTES)
        _HEAD.pack_into(envelope, 0, tag, _INLINE if is_inline else _PLAIN, len(message.head))
        if is_inline:
            envelope[_HEAD.size : _HEAD.size + len(message.head)] = message.head
        row = torch.frombuffer(envelope, dtype=torch.uint8)
        exchange_tensors(self._group, "send", {dest: [row]}, {}, _ENVELOPE_TAG)
        head = [] if is_inline else [torch.frombuffer(bytearray(message.head), dtype=torch.uint8)]
        exchange_tensors(self._group, "send", {dest: [*head, *message.buffers]}, {}, _BODY_TAG)
        if refusal is not None:
            raise refusal

    def receive(self, source: int, tag: int) -> tuple[Any, Status]:
        """The first message that fits, and where it came from. Called by the receiver.

        Raises RankMismatchError: its sender refused to send the object.
        """
        while True:
            for letter in self._arrived:
                if source in (letter.source, ANY_SOURCE) and tag in (letter.tag, ANY_TAG):
                    self._arrived.remove(letter)
                    return self._opened(letter), Status(letter.source, letter.tag)
            try:
                self._accept(source)
            except CommunicationError as error:
                if not self._arrived:
                    raise
                unread = ", ".join(f"rank {it.source} tag {it.tag}" for it in self._arrived[:8])
                raise type(error)(f"{error} Messages that nobody asked for: {unread}.") from error

    def _accept(self, source: int) -> None:
        """Receive the next message of ``source``, whatever its tag."""
        row = torch.empty(ENVELOPE_BYTES, dtype=torch.uint8, device="cpu")
        if source == ANY_SOURCE:
            source = self._group.receive_any(row, name="recv", tag=_ENVELOPE_TAG)
        else:
            exchange_tensors(self._group, "recv", {}, {source: [row]}, _ENVELOPE_TAG)
        envelope = row.numpy().tobytes()
        tag, state, nbytes = _HEAD.unpack_from(envelope)
        if state == _INLINE:
            head = envelope[_HEAD.size : _HEAD.size + nbytes]
        else:
            described = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            exchange_tensors(self._group, "recv", {}, {source: [described]}, _BODY_TAG)
            head = described.numpy().tobytes()
        note, body, tensors = object_codec.unpack_head(head, self._device)
        buffers = [object_codec.as_bytes(tensor) for tensor in tensors]
        exchange_tensors(self._group, "recv", {}, {source: buffers}, _BODY_TAG)
        self._arrived.append(_Letter(source, tag, note, body, tensors))

    def _opened(self, letter: _Letter) -> Any:
        if letter.note == _REFUSED:
            raise RankMismatchError(
                f"{self._group.rank_label} is in recv, but rank {letter.source} refused to send: "
                f"{letter.body}"
            )
        return object_codec.unpack(letter.body, letter.tensors, self._trust)


def checked_tag(tag: int, *, may_be_any: bool = False) -> int:
    """The tag. Raises UsageError: it is none."""
    is_known = isinstance(tag, int) and 0 <= tag < 2**63
    if not is_known and not (may_be_any and tag == ANY_TAG):
        also = " or ANY_TAG" if may_be_any else ""
        raise UsageError(f"tag={tag!r}. It must be an integer from 0 to 2**63 - 1{also}.")
    return tag
