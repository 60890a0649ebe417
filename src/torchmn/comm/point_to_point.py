"""Point-to-point messages: send and receive by source and tag.

A message begins with an envelope of `ENVELOPE_BYTES`: its tag, the size of its description, and
the description itself if it is short. The envelopes of one sender arrive in order, whatever their
tags. Messages that were not requested yet are queued, as in MPI's queue of unexpected messages, so
the receiver can request messages with any tag and from any source.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.comm import object_codec
from torchmn.comm.engine import mark_as_rejection
from torchmn.comm.engine_jobs import exchange_tensors
from torchmn.comm.group import Group
from torchmn.comm.transports.base import SYNCHRONOUS_TAG

ANY_SOURCE = -1
"""Value of ``source`` in `recv` and `recv_obj`: receive from the rank that sends first."""
ANY_TAG = -1
"""Value of ``tag`` in `recv` and `recv_obj`: receive a message with any tag."""

ENVELOPE_BYTES = 256
_HEAD = struct.Struct("<qBq")  # tag, state, bytes of the description
_INLINE_BYTES = ENVELOPE_BYTES - _HEAD.size
_PLAIN, _INLINE = range(2)
_REJECTED = "rejected"
_ENVELOPE_TAG = SYNCHRONOUS_TAG - 2  # tag of the transport; bodies use the next, collectives 0


class HasStatus(Protocol):
    """An object that takes the source and tag of a message, such as `Status`."""

    source: Any
    tag: Any


@dataclass
class Status:
    """The source and tag of a message, filled in by ``recv(..., status=status)``. Local.

    ``source`` and ``tag`` are `ANY_SOURCE` and `ANY_TAG` before that.

    Example:
        >>> Status()
        Status(source=-1, tag=-1)
    """

    source: int = ANY_SOURCE
    tag: int = ANY_TAG


def sealed(head: bytes, tag: int = 0) -> list[Tensor]:
    """The envelope of a message, and its description ``head`` if that is too long for it. Local."""
    is_inline = len(head) <= _INLINE_BYTES
    envelope = bytearray(ENVELOPE_BYTES)
    _HEAD.pack_into(envelope, 0, tag, _INLINE if is_inline else _PLAIN, len(head))
    if is_inline:
        envelope[_HEAD.size : _HEAD.size + len(head)] = head
    parts = [envelope] if is_inline else [envelope, bytearray(head)]
    return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]


def opened(row: Tensor, receive: Callable[[Tensor], object]) -> tuple[int, bytes]:
    """The tag and the description of a message whose envelope has arrived.

    ``receive`` is called with the memory of a description that follows the envelope.
    """
    envelope = row.numpy().tobytes()
    tag, state, nbytes = _HEAD.unpack_from(envelope)
    if state == _INLINE:
        return tag, envelope[_HEAD.size : _HEAD.size + nbytes]
    head = new_bytes(nbytes)
    receive(head)
    return tag, head.numpy().tobytes()


def new_bytes(nbytes: int) -> Tensor:
    """Uninitialized memory of the host, in bytes. Local."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True)
class _Received:
    """A message that has arrived and was not requested yet."""

    source: int
    tag: int
    note: str
    body: Any
    tensors: list[Tensor]


@dataclass(eq=False)
class PointToPoint:
    """Point-to-point messages of one rank. Methods run inside engine jobs.

    With ``is_synchronous=True`` messages use a separate channel and are sent only while the
    receiver is in `receive`, for this or any other message.
    """

    _group: Group
    _trust: object_codec.Trust
    _device: torch.device
    is_synchronous: bool = False

    def __post_init__(self) -> None:
        self._unexpected: list[_Received] = []
        self._envelope_tag = SYNCHRONOUS_TAG if self.is_synchronous else _ENVELOPE_TAG
        self._body_tag = self._envelope_tag + 1

    def send(self, obj: object, dest: int, tag: int) -> None:
        """Send an object. Called by the sender only.

        If the object cannot be sent, the receiver gets the reason instead, and both ranks raise.
        """
        rejection = None
        try:
            message = object_codec.pack(obj, self._trust)
        except Exception as error:
            # Whatever it is: the receiver waits for a message, and must learn why it gets none.
            rejection = error
            mark_as_rejection(error)
            message = object_codec.pack(str(error), self._trust, note=_REJECTED)
        row, *head = sealed(message.head, tag)
        # By itself: the receiver has to know the sizes before it can receive the rest.
        exchange_tensors(self._group, "send", {dest: [row]}, {}, self._envelope_tag)
        exchange_tensors(self._group, "send", {dest: [*head, *message.buffers]}, {}, self._body_tag)
        if rejection is not None:
            raise rejection

    def receive(self, source: int, tag: int) -> tuple[Any, Status]:
        """Return the first matching object with its source and tag. Called by the receiver only.

        Raises RankMismatchError: the sender could not send the object.
        """
        # A synchronous sender waits for a receive. If this one accepted a single source only, more
        # than two ranks could wait for each other in a circle.
        accepts_all = self.is_synchronous and self._group.size > 2
        while True:
            for message in self._unexpected:
                if source in (message.source, ANY_SOURCE) and tag in (message.tag, ANY_TAG):
                    self._unexpected.remove(message)
                    return self._opened(message), Status(message.source, message.tag)
            try:
                self._accept(ANY_SOURCE if accepts_all else source)
            except CommunicationError as error:
                if not self._unexpected:
                    raise
                unread = ", ".join(f"rank {it.source} tag {it.tag}" for it in self._unexpected[:8])
                raise type(error)(f"{error} Messages that were not requested: {unread}.") from error

    def unread(self) -> list[tuple[int, int, Any]]:
        """Source, tag and object of messages that have arrived and were not requested."""
        return [
            (it.source, it.tag, object_codec.unpack(it.body, it.tensors, self._trust))
            for it in self._unexpected
        ]

    def _accept(self, source: int) -> None:
        """Receive the next message from ``source``, with any tag, into the queue."""
        row = new_bytes(ENVELOPE_BYTES)
        if source == ANY_SOURCE:
            source = self._group.receive_any(row, name="recv", tag=self._envelope_tag)
        else:
            exchange_tensors(self._group, "recv", {}, {source: [row]}, self._envelope_tag)

        def receive(rest: Tensor) -> None:
            exchange_tensors(self._group, "recv", {}, {source: [rest]}, self._body_tag)

        tag, head = opened(row, receive)
        note, body, tensors = object_codec.unpack_head(head, self._device)
        buffers = [object_codec.as_bytes(tensor) for tensor in tensors]
        exchange_tensors(self._group, "recv", {}, {source: buffers}, self._body_tag)
        self._unexpected.append(_Received(source, tag, note, body, tensors))

    def _opened(self, message: _Received) -> Any:
        if message.note == _REJECTED:
            raise RankMismatchError(
                f"{self._group.rank_label} is in recv, but rank {message.source} could not send: "
                f"{message.body}"
            )
        # Not when it arrived: a pickle that is not trusted raises in the call that asks for it.
        return object_codec.unpack(message.body, message.tensors, self._trust)


class Replies:
    """Replies to numbered messages, such as the gradients of a differentiable `send`.

    They use a separate channel, so they are never mixed with messages of the script.
    """

    def __init__(self, group: Group, trust: object_codec.Trust, device: torch.device) -> None:
        self._engine = group.engine
        self._messages = PointToPoint(group, trust, device, is_synchronous=True)
        self._num_numbered: Counter[int] = Counter()

    def new_number(self, dest: int) -> int:
        """The number, from 1, of the next message to ``dest`` that expects a reply. Local."""
        self._num_numbered[dest] += 1
        return self._num_numbered[dest]

    def send(self, obj: object, dest: int, number: int) -> None:
        """Reply to a numbered message from ``dest``. Called by the receiver of that message."""
        self._engine.call(lambda: self._messages.send(obj, dest, number))

    def recv(self, source: int, number: int) -> Any:
        """The reply to a numbered message to ``source``. Called by the sender of that message."""
        return self._engine.call(lambda: self._messages.receive(source, number)[0])

    def unread(self) -> list[tuple[int, int, Any]]:
        """Source, number and object of replies that have arrived and were not requested. Local."""
        return self._messages.unread()


def checked_tag(tag: int, *, may_be_any: bool = False) -> int:
    """Return ``tag`` if it is valid. Raises UsageError otherwise."""
    is_known = isinstance(tag, int) and 0 <= tag < 2**63
    if not is_known and not (may_be_any and tag == ANY_TAG):
        also = " or ANY_TAG" if may_be_any else ""
        raise UsageError(f"tag={tag!r} must be an integer from 0 to 2**63 - 1{also}.")
    return tag
