"""Checkpoints in the memory of the hosts, for `torchmn run --elastic`.

The files are those of a checkpoint in a folder. Each lies with the process that runs this host's
part of the job, which outlives the ranks, and with that of the next host. So a lost host takes no
checkpoint with it, and going on costs the steps since the last copy and nothing from a disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchmn.checkpoint.manifest import parse
from torchmn.checkpoint.retention import DRAFT, name_of
from torchmn.checkpoint.storage import MANIFEST, Reader
from torchmn.control.checkpoint_replicas.client import ReplicaClient
from torchmn.control.checkpoint_replicas.frames import Payload
from torchmn.control.messages.elastic import StagedCheckpoint
from torchmn.errors import DataError, LaunchError

_STEP = re.compile(re.escape(DRAFT) + r"(\d+)-")


class MemoryStorage:
    """A `Storage` that holds one finished checkpoint: the newest when this round began."""

    sees_all_ranks = False

    def __init__(self, copies: ReplicaClient) -> None:
        self._copies = copies
        self._is_outdated = False

    def write(self, draft: str, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See `Storage.write`: durable is what the next host holds, too."""
        self._put(draft, file, pieces)

    def open(self, checkpoint: str, file: str) -> Reader:
        """See `Storage.open`."""
        found = self._found()
        if found is None:
            raise DataError(f"{file} is not held in memory")
        try:
            return _MemoryReader(file, self._copies.get(found, file))
        except LaunchError as error:
            raise DataError(str(error)) from None

    def commit(self, draft: str, checkpoint: str, manifest: bytes) -> None:
        """See `Storage.commit`: it counts once the hosts hold all that the manifest names."""
        self._put(draft, MANIFEST, [manifest], needs=(*parse(manifest).files, MANIFEST))
        self._is_outdated = True

    def names(self) -> list[str]:
        """See `Storage.names`."""
        found = self._found()
        return [] if found is None else [name_of(found[1], [])]

    def remove(self, name: str) -> None:
        """See `Storage.remove`: the hosts forget by themselves what is older than a whole one."""

    def _found(self) -> StagedCheckpoint | None:
        if self._is_outdated:
            return None
        try:
            return self._copies.restored()
        except LaunchError as error:
            raise OSError(str(error)) from None

    def _put(
        self,
        draft: str,
        file: str,
        pieces: Iterable[bytes | memoryview],
        needs: tuple[str, ...] = (),
    ) -> None:
        found = _STEP.match(draft)
        step = int(found[1]) if found else 0
        try:
            self._copies.put(step, draft, file, list(pieces), needs=needs)
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
            raise DataError(f"{self._name} ends {target.nbytes - piece.nbytes} bytes too early")
        target[:] = piece

    def close(self) -> None:
        """See `Reader.close`."""
        self._held.release()
