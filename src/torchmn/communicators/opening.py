"""How a collective begins: all ranks compare what they call before any data move.

Every collective that users call begins with one row of `ROW_BYTES` from each rank to every other.
A row holds a 64-bit signature of the call (its name, op, root, dtype, the shapes that must be
equal), the size of the message that follows, and the message itself where it is short. So the
comparison costs no round of its own: the sizes had to travel anyway, and a short message arrives
with them.

Where a signature differs, or a rank had to refuse its call because of an argument, all ranks
exchange their calls as text and raise: the rank that refused raises its own error, the others
RankMismatchError. After that they may go on together.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from torchmn.communicators.group import Group
from torchmn.errors import CommunicationError, RankMismatchError, TorchmnError

ROW_BYTES = 256
_HEAD = struct.Struct("<8sBiq")  # signature, state, bytes of the call as text, bytes of the message
INLINE_BYTES = ROW_BYTES - _HEAD.size

_PLAIN, _INLINE, _REFUSED = range(3)
_MAX_VERSIONS = 8


class Call:
    """A collective with its arguments, as one rank calls it: ``Call("bcast", root=1)``. Local.

    ``parts`` are what has to be equal in a list: tensors with their names, say. Ranks agree if
    name, arguments and parts are equal.
    """

    def __init__(self, name: str, parts: Sequence[str] = (), **arguments: object) -> None:
        self.name = name
        self.parts = list(parts)
        self.title = f"{name}({', '.join(f'{key}={arguments[key]}' for key in arguments)})"

    @property
    def words(self) -> bytes:
        """All of it as text."""
        return json.dumps([self.title, self.parts]).encode()


@dataclass(frozen=True)
class Row:
    """What a rank says about its message: its size, and the message itself where it is short."""

    nbytes: int
    inline: bytes | None


class Opening:
    """The beginning of every collective of one group. Its methods run inside engine jobs."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def meet(self, call: Call, nbytes: int = 0, inline: bytes | None = None) -> list[Row]:
        """The rows of all ranks, once they all make the same call. *Collective.*

        ``nbytes`` is the size of the message that follows, which is ``inline`` where that has at
        most `INLINE_BYTES`. Raises RankMismatchError on all ranks: the calls differ, or a rank
        refused its own.
        """
        if self._group.size == 1:
            return [Row(nbytes, inline)]
        words = call.words
        state = _PLAIN if inline is None else _INLINE
        heads, rows = self._exchange(call.name, words, state, nbytes, inline or b"")
        if any(head[0] != heads[0][0] or head[1] == _REFUSED for head in heads):
            self._raise_on_all(call.name, words, heads, None)
        return rows

    def refuse(self, name: str, error: Exception) -> NoReturn:
        """Raise ``error`` here and a RankMismatchError with its text on all other ranks.

        *Collective.*
        """
        if self._group.size == 1:
            raise error
        kind = "" if isinstance(error, TorchmnError) else f"{type(error).__name__}: "
        words = f"{kind}{error}".encode()
        try:
            heads, _ = self._exchange(name, words, _REFUSED, 0, b"")
            self._raise_on_all(name, words, heads, error)
        except CommunicationError as late:
            if late is error:
                raise
            raise type(late)(f"{late} This rank refused its own call: {error}") from error

    def _exchange(
        self, name: str, words: bytes, state: int, nbytes: int, inline: bytes
    ) -> tuple[list[tuple[bytes, int, int, int]], list[Row]]:
        signature = hashlib.blake2b(words, digest_size=8).digest()
        row = bytearray(ROW_BYTES)
        _HEAD.pack_into(row, 0, signature, state, len(words), nbytes)
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
        words: bytes,
        heads: Sequence[tuple[bytes, int, int, int]],
        own_error: Exception | None,
    ) -> NoReturn:
        """Exchange the calls as text and raise what they come to. *Collective.*"""
        row = bytearray(max(head[2] for head in heads))
        row[: len(words)] = words
        table = self._group.all_gather_fixed(torch.frombuffer(row, dtype=torch.uint8), name=name)
        texts = [
            raw.tobytes()[: head[2]].decode()
            for raw, head in zip(table.numpy(), heads, strict=True)
        ]
        if own_error is not None:
            raise own_error
        for rank, head in enumerate(heads):
            if head[1] == _REFUSED:
                own_title = json.loads(words)[0]
                raise RankMismatchError(
                    f"{self._group.rank_label} is in {own_title}, but rank {rank} refused it: "
                    f"{texts[rank]}"
                )
        raise RankMismatchError(f"{self._group.rank_label}: {_difference(texts)}")


def _difference(texts: Sequence[str]) -> str:
    """What an error says about calls that are not the same."""
    calls = [json.loads(text) for text in texts]
    titles = [title for title, _ in calls]
    rule = "All ranks must make the same calls with the same arguments, in the same order."
    if len(set(titles)) > 1:
        return f"ranks are in different calls: {_versions(titles)}. {rule}"
    longest = max(len(parts) for _, parts in calls)
    for index in range(longest):
        seen = [parts[index] if index < len(parts) else "nothing" for _, parts in calls]
        if len(set(seen)) > 1:
            return f"ranks differ in part {index} of {titles[0]}: {_versions(seen)}. {rule}"
    return f"ranks sent signatures that belong to no call, in {titles[0]}. {rule}"


def _versions(seen: Sequence[str]) -> str:
    """Who has what: ``ranks 0, 2: a; rank 1: b``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(seen):
        ranks_of.setdefault(text, []).append(rank)
    said = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in list(ranks_of.items())[:_MAX_VERSIONS]
    ]
    return "; ".join(said) + ("; ..." if len(ranks_of) > _MAX_VERSIONS else "")
