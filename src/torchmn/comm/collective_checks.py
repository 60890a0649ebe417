"""Check that all ranks make the same call, before any data is sent.

Every collective that users call begins with an all-gather of one row of `ROW_BYTES` per rank. A row
holds a 64-bit signature of the call (its name, op, root, dtype and the shapes that must be equal),
the size of the message that follows, and the message itself if it is short. The comparison needs no
extra round: the sizes have to be sent anyway, and a short message arrives with them.

If signatures differ, or a rank rejects its call because of an invalid argument, all ranks exchange
their calls as text and raise: a rank that rejected its call raises its own error, the others
RankMismatchError. All ranks can continue with the next collective afterwards.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from torchmn.base.errors import CommunicationError, RankMismatchError, TorchmnError
from torchmn.comm.engine import mark_as_rejection
from torchmn.comm.group import Group

ROW_BYTES = 256
_HEAD = struct.Struct("<8sBiq")  # signature, state, bytes of the call as text, bytes of the message
INLINE_BYTES = ROW_BYTES - _HEAD.size

_PLAIN, _INLINE, _REJECTED = range(3)
_MAX_VERSIONS = 8


class Call:
    """A collective with its arguments, as one rank calls it: ``Call("bcast", root=1)``. Local.

    ``parts`` is a list that must be equal on all ranks, such as names and shapes of tensors. Calls
    are the same if name, arguments and parts are equal.
    """

    def __init__(self, name: str, parts: Sequence[str] = (), **arguments: object) -> None:
        self.name = name
        self.parts = list(parts)
        self.title = f"{name}({', '.join(f'{key}={arguments[key]}' for key in arguments)})"

    @property
    def text(self) -> bytes:
        """Name, arguments and parts as JSON."""
        return json.dumps([self.title, self.parts]).encode()


@dataclass(frozen=True)
class Row:
    """The size of a rank's message, and the message itself if it is short."""

    nbytes: int
    inline: bytes | None


class CallCheck:
    """Compares the calls of all ranks of a group. Methods run inside engine jobs."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def compare(self, call: Call, nbytes: int = 0, inline: bytes | None = None) -> list[Row]:
        """Check that all ranks make the same call; returns the rows of all ranks. *Collective.*

        ``nbytes`` is the size of the message that follows. A message of at most `INLINE_BYTES` is
        passed as ``inline`` and sent with the row. Raises RankMismatchError on all ranks: the calls
        differ, or a rank rejected its own.
        """
        if self._group.size == 1:
            return [Row(nbytes, inline)]
        text = call.text
        state = _PLAIN if inline is None else _INLINE
        heads, rows = self._exchange(call.name, text, state, nbytes, inline or b"")
        # All ranks have the same rows, so all take the same branch and none is left waiting.
        if any(head[0] != heads[0][0] or head[1] == _REJECTED for head in heads):
            self._raise_on_all(call.name, text, heads, None)
        return rows

    def reject(self, name: str, error: Exception) -> NoReturn:
        """Raise ``error`` on this rank and RankMismatchError with its text on the other ranks.

        *Collective.*
        """
        mark_as_rejection(error)
        if self._group.size == 1:
            raise error
        # The other ranks are in this call, or will be: it ends for them when each has sent a row.
        kind = "" if isinstance(error, TorchmnError) else f"{type(error).__name__}: "
        text = f"{kind}{error}".encode()
        try:
            heads, _ = self._exchange(name, text, _REJECTED, 0, b"")
            self._raise_on_all(name, text, heads, error)
        except CommunicationError as late:
            if late is error:  # the rejection itself, which may be of this class
                raise
            raise type(late)(f"{late} This rank rejected its own call: {error}") from error

    def _exchange(
        self, name: str, text: bytes, state: int, nbytes: int, inline: bytes
    ) -> tuple[list[tuple[bytes, int, int, int]], list[Row]]:
        signature = hashlib.blake2b(text, digest_size=8).digest()
        row = bytearray(ROW_BYTES)
        _HEAD.pack_into(row, 0, signature, state, len(text), nbytes)
        row[_HEAD.size : _HEAD.size + len(inline)] = inline
        table = self._group.all_gather_fixed(torch.frombuffer(row, dtype=torch.uint8), name=name)
        heads, rows = [], []
        for raw in table.numpy():
            theirs = raw.tobytes()
            head = _HEAD.unpack_from(theirs)
            message = theirs[_HEAD.size : _HEAD.size + head[3]] if head[1] == _INLINE else None
            heads.append(head)
            rows.append(Row(head[3], message))
        return heads, rows

    def _raise_on_all(
        self,
        name: str,
        text: bytes,
        heads: Sequence[tuple[bytes, int, int, int]],
        own_error: Exception | None,
    ) -> NoReturn:
        """Gather the calls of all ranks as text and raise the error of this rank. *Collective.*"""
        # The rows of an all-gather have one length: that of the longest call.
        row = bytearray(max(head[2] for head in heads))
        row[: len(text)] = text
        table = self._group.all_gather_fixed(torch.frombuffer(row, dtype=torch.uint8), name=name)
        texts = [
            raw.tobytes()[: head[2]].decode()
            for raw, head in zip(table.numpy(), heads, strict=True)
        ]
        if own_error is not None:
            raise own_error
        for rank, head in enumerate(heads):
            if head[1] == _REJECTED:
                own_title = json.loads(text)[0]
                raise RankMismatchError(
                    f"{self._group.rank_label} is in {own_title}, but rank {rank} rejected it: "
                    f"{texts[rank]}"
                )
        raise RankMismatchError(f"{self._group.rank_label}: {_difference(texts)}")


def raise_if_values_differ(where: str, by_rank: Sequence[Mapping[str, object]], cure: str) -> None:
    """Raise RankMismatchError if the ranks' values of any name differ. Local."""
    for name in by_rank[0]:
        values = [repr(values.get(name)) for values in by_rank]
        if len(set(values)) > 1:
            raise RankMismatchError(f"{where} with different {name}: {_versions(values)}. {cure}")


def _difference(texts: Sequence[str]) -> str:
    """The message of an error about calls that differ."""
    calls = [json.loads(text) for text in texts]
    titles = [title for title, _ in calls]
    rule = "All ranks must make the same calls with the same arguments, in the same order."
    if len(set(titles)) > 1:
        return f"ranks are in different calls: {_versions(titles)}. {rule}"
    longest = max(len(parts) for _, parts in calls)
    for index in range(longest):
        seen = [parts[index] if index < len(parts) else "missing" for _, parts in calls]
        if len(set(seen)) > 1:
            return f"ranks differ in part {index} of {titles[0]}: {_versions(seen)}. {rule}"
    return f"ranks sent signatures of no call, in {titles[0]}. {rule}"


def _versions(seen: Sequence[str]) -> str:
    """The ranks of each value, as text: ``ranks 0, 2: a; rank 1: b``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(seen):
        ranks_of.setdefault(text, []).append(rank)
    shown = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in list(ranks_of.items())[:_MAX_VERSIONS]
    ]
    return "; ".join(shown) + ("; ..." if len(ranks_of) > _MAX_VERSIONS else "")
