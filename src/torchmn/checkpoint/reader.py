"""Reading a checkpoint. All bytes that are read are verified against checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from msgspec import MsgspecError, convert
from torch import Tensor

from torchmn.base.errors import DataError, UsageError
from torchmn.checkpoint.manifest import Manifest
from torchmn.checkpoint.shard_file import ShardReader
from torchmn.checkpoint.snapshot import SavedRank
from torchmn.checkpoint.storage import FileReader, FolderStorage, read_text
from torchmn.comm import object_codec
from torchmn.comm.checksums import digest
from torchmn.comm.local_tensors import PART
from torchmn.comm.object_kinds import torch_dtype

_MAX_READERS = 64  # open files; a process may often have 1024, for sockets and loaders too


class SavedCheckpoint:
    """One checkpoint, from which any rank reads what it needs. Local; a context manager.

    Every method raises DataError: a file is missing, truncated or damaged; the message names it.
    """

    def __init__(self, storage: FolderStorage, name: str, manifest: Manifest) -> None:
        self.name = name
        self.manifest = manifest
        self._storage = storage
        self._readers: dict[str, ShardReader] = {}
        self._ranks: dict[int, SavedRank] = {}

    def __enter__(self) -> SavedCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def labels(self, rank: int) -> list[str]:
        """The names of the objects that a rank has saved."""
        return list(self._rank(rank).objects)

    def grid(self) -> dict[str, int]:
        """Axis sizes of the grid that saved the checkpoint; empty if there was no grid."""
        return self._rank(0).grid

    def raise_if_ranks_differ(self, label: str, ranks: Sequence[int]) -> None:
        """Raise UsageError if tensors of an object, except parts of DTensors, differ on ranks."""
        held = [
            {
                name: self._checksum(file, name)
                for name, file in self._places(rank, label)
                # Parts of DTensors differ by design: `parts` puts them together from all ranks.
                if f"/{PART}" not in name
            }
            for rank in ranks
        ]
        for other in held[1:]:
            if other != held[0]:
                odd = sorted(n for n in {*other, *held[0]} if other.get(n) != held[0].get(n))
                raise UsageError(
                    f"{self.name} was saved by {len(ranks)} ranks per model, which had different "
                    f"values of {', '.join(odd[:3])}. These are not parts of DTensors: only a grid "
                    f"with axes {self.grid()} loads them; the size of its first axis may differ."
                )

    def optimizer_of(self, rank: int, label: str) -> str:
        """The class name of an optimizer that a rank has saved; "" for any other object."""
        return self._rank(rank).objects[label].optimizer

    def state_of(self, rank: int, label: str, shared: dict[str, Tensor] | None = None) -> Any:
        """Read the ``state_dict()`` of an object on an old rank, with all tensors on the CPU.

        ``shared`` caches tensors by file and name, so that those that several ranks have in common
        are read once; the caller must not modify them.
        """
        places = self._places(rank, label)
        body = self._rank(rank).objects[label].body
        try:
            # A valid checksum does not make the content valid: another program may have written it.
            kinds = list(object_codec.kinds_of(body))
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise DataError(f"rank{rank:04d}.json does not describe a state: {error}") from error
        if len(kinds) != len(places):
            raise DataError(f"rank{rank:04d}.json describes {len(kinds)} tensors of {len(places)}")
        tensors = []
        for (name, file), kind in zip(places, kinds, strict=True):
            key = f"{file}/{name}"
            memory = shared.get(key) if shared is not None else None
            if memory is None:
                memory = self._read(file, name)
            if shared is not None:
                shared[key] = memory
            tensors.append(_shaped(memory, kind, name))
        return object_codec.build(body, tensors)

    def states_of(self, ranks: Iterable[int], label: str) -> Iterator[Any]:
        """Iterate over the states of an object on several ranks, each read when requested."""
        for rank in ranks:
            yield self.state_of(rank, label)

    def _rank(self, rank: int) -> SavedRank:
        if rank not in self._ranks:
            name = f"rank{rank:04d}.json"
            entry = self.manifest.files.get(name)
            if entry is None:
                raise DataError(f"manifest.json lists no {name}")
            with closing(self._open(name)) as reader:
                raw = read_text(reader, name, b"{")
            if digest(raw) != entry.checksum:
                raise DataError(f"{name} is damaged: it does not match its checksum")
            try:
                self._ranks[rank] = convert(json.loads(raw), SavedRank)
            except (MsgspecError, ValueError, RecursionError) as error:
                text = str(error)[:200]
                raise DataError(f"{name} does not describe a state: {text}") from error
        return self._ranks[rank]

    def _places(self, rank: int, label: str) -> list[tuple[str, str]]:
        """List (tensor name, file name) of an object's tensors, in the order of its description."""
        saved = self._rank(rank)
        if label not in saved.objects:
            raise DataError(f"rank{rank:04d}.json has no object '{label}'")
        names = saved.objects[label].parts
        if missing := [name for name in names if name not in saved.where]:
            raise DataError(f"rank{rank:04d}.json does not say which rank saved '{missing[0]}'")
        return [(name, f"rank{saved.where[name]:04d}.safetensors") for name in names]

    def _checksum(self, file: str, name: str) -> str:
        entry = self.manifest.files.get(file)
        if entry is None or name not in entry.tensors:
            raise DataError(f"manifest.json lists no '{name}' in {file}")
        return entry.tensors[name]

    def _read(self, file: str, name: str) -> Tensor:
        checksum = self._checksum(file, name)
        if file not in self._readers:
            if len(self._readers) >= _MAX_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._open(file)
            try:
                self._readers[file] = ShardReader(reader, file, self.manifest.files[file].checksum)
            except DataError:
                reader.close()
                raise
        return self._readers[file].read(name, checksum)

    def _open(self, file: str) -> FileReader:
        reader = self._storage.open(self.name, file)
        nbytes = self.manifest.files[file].nbytes
        # Before anything is read: a file that was cut, or is not complete on this host yet, has no
        # header that could be trusted.
        if reader.nbytes != nbytes:
            reader.close()
            raise DataError(f"{file} has {reader.nbytes} bytes instead of {nbytes}")
        return reader


def _shaped(memory: Tensor, kind: Sequence[Any], name: str) -> Tensor:
    """View bytes as the tensor that is described; return the bytes of any other kind unchanged."""
    if kind[0] != "tensor":
        return memory
    try:
        dtype, shape = torch_dtype(kind[1]), [int(n) for n in kind[2]]
        return memory.view(dtype).view(shape)
    except (ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise DataError(f"'{name}' does not have the shape that is described: {error}") from error
