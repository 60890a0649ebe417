"""Checkpoints in the memory of the hosts, for `torchmn run --elastic`.

The files are those of a checkpoint in a folder. Each is held by the process that runs this host's
part of the job, which outlives the ranks, and by that of the next host. So no checkpoint is lost
with a host, and resuming repeats the steps since the last save and reads nothing from a disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmn.checkpoint.manifest import parse
from torchmn.checkpoint.retention import TEMPORARY, name_of
from torchmn.checkpoint.storage import MANIFEST, Reader
from torchmn.control.checkpoint_replicas.client import ReplicaClient
from torchmn.control.checkpoint_replicas.frames import Payload
from torchmn.control.messages.elastic import StagedCheckpoint
from torchmn.errors import DataError, LaunchError

_STEP = re.compile(re.escape(TEMPORARY) + r"(\d+)-")


class MemoryStorage:
    """A `Storage` that holds one finished checkpoint: the newest when this round began."""

    sees_all_ranks = False

    def __init__(self, copies: ReplicaClient) -> None:
        self._copies = copies
        self._is_outdated = False

    def write(self, staged: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Storage.write`: durable means that the next host holds it, too."""
        self._put(staged, file, pieces)

    def open(self, checkpoint: str, file: str) -> Reader:
        """See `Storage.open`."""
        found = self._found()
        if found is None:
            raise DataError(f"{file} is not held in memory")
        try:
            return _MemoryReader(file, self._copies.get(found, file))
        except LaunchError as error:
            raise DataError(str(error)) from None

    def commit(self, staged: str, checkpoint: str, manifest: bytes) -> None:
        """See `Storage.commit`: it is valid once the hosts hold all files of the manifest."""
        self._put(staged, MANIFEST, [manifest], needs=(*parse(manifest).files, MANIFEST))
        self._is_outdated = True

    def names(self) -> list[str]:
        """See `Storage.names`."""
        found = self._found()
        return [] if found is None else [name_of(found.step, [])]

    def remove(self, name: str) -> None:
        """See `Storage.remove`: the hosts themselves discard what a complete one supersedes."""

    def _found(self) -> StagedCheckpoint | None:
        if self._is_outdated:
            return None
        try:
            return self._copies.restored()
        except LaunchError as error:
            raise OSError(str(error)) from None

    def _put(
        self,
        staged: str,
        file: str,
        pieces: Iterable[bytes | memoryview],
        needs: tuple[str, ...] = (),
    ) -> None:
        found = _STEP.match(staged)
        step = int(found[1]) if found else 0
        try:
            self._copies.put(step, staged, file, list(pieces), needs=needs)
        except LaunchError as error:
            raise OSError(str(error)) from None


class _MemoryReader:
    """See `Reader`."""

    def __init__(self, name: str, held: Payload) -> None:
        self._name = name
        self._held = memoryview(held)
        self.nbytes = self._held.nbytes

    def read_into(self, offset: int, memory: memoryview) -> None:
        """See `Reader.read_into`."""
        target = memory.cast("B")
        piece = self._held[offset : offset + target.nbytes]
        if piece.nbytes < target.nbytes:
            raise DataError(f"{self._name} is {target.nbytes - piece.nbytes} bytes too short")
        target[:] = piece

    def close(self) -> None:
        """See `Reader.close`."""
        self._held.release()
