"""Writing one checkpoint on all ranks, in a background thread during training.

    1. every rank computes checksums of its copy; all gather them and assign tensors to writers
    2. every rank writes its shard into the staged checkpoint and reports the result
    3. rank 0 checks all files, adds the manifest, commits the checkpoint and removes old ones

A rank that fails at any point reports it in the next round, and all ranks abort the checkpoint.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import torch

from torchmn import __version__
from torchmn.base import events
from torchmn.base.errors import DataError
from torchmn.base.log import Log
from torchmn.checkpoint.control_channel import ControlChannel
from torchmn.checkpoint.manifest import (
    BEGIN,
    TEMPORARY,
    Best,
    FileEntry,
    Manifest,
    checkpoints_to_delete,
    is_checkpoint,
    name_of,
    order_of,
    parse,
)
from torchmn.checkpoint.shard_file import TensorEntry, header_of, in_file_order
from torchmn.checkpoint.snapshot import Copy, SavedRank
from torchmn.checkpoint.storage import MANIFEST, FolderStorage, read_text
from torchmn.comm import Communicator
from torchmn.comm.checksums import describe_differences, differences, digest
from torchmn.comm.grid import num_model_parts
from torchmn.comm.object_codec import as_bytes
from torchmn.control.script import record_progress

_log = Log(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A save to be written; ``problem`` replaces the copy if this rank could not make one."""

    step: int
    copy: Copy | None
    metric: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a save, the same on all ranks.

    ``problem`` says why there is no checkpoint, ``disagreement`` how replicas differ, and ``note``
    what else failed; each is None if there is nothing to say.
    """

    problem: str | None = None
    disagreement: str | None = None
    note: str | None = None


@dataclass(kw_only=True)
class Writer:
    """Writes checkpoints on one rank. ``bad`` names checkpoints that were found to be damaged."""

    comm: Communicator  # only what describes it: another thread exchanges gradients over it
    storage: FolderStorage
    channel: ControlChannel
    keep: int
    best: Best | None
    # Axis sizes; ranks along the first axis hold the same part of the model, others another part.
    grid: Mapping[str, int] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)

    def write(self, request: Request) -> Outcome:
        """Write one checkpoint. *Collective*, on the one thread that uses the channel.

        Raises CommunicationError: another rank was lost, and the checkpoint does not exist.
        """
        gathered = self._exchange_catalogues(request)
        problems = [each["problem"] for each in gathered if each["problem"]]
        steps = sorted({each["step"] for each in gathered})
        if not problems and len(steps) > 1:
            problems = [f"the ranks save different steps: {[each['step'] for each in gathered]}"]
        if problems or request.copy is None:
            # Every rank has gathered the same problems: all return here, and none waits in round 2.
            return self._failed(request, problems)
        disagreement = _disagreement(gathered, request.step, num_model_parts(self.grid))
        if disagreement:
            return Outcome(disagreement=disagreement)
        catalogues = [
            [TensorEntry(n, dtype, tuple(shape), c, nbytes) for n, dtype, shape, c, nbytes in rows]
            for rows in (each["tensors"] for each in gathered)
        ]
        # Computed by every rank from the same catalogues, so nothing needs to be sent.
        owned = owners(catalogues)
        # Rank 0's nonce: a repeated save of this step must not mix with files of an aborted one.
        staged = f"{TEMPORARY}{request.step:08d}-{gathered[0]['nonce']}"
        own = self._write_shard(
            staged, request.copy, catalogues[self.comm.rank], owned[self.comm.rank]
        )
        nbytes = sum(entry.nbytes for catalogue in catalogues for entry in catalogue)
        reports = self.channel.all_gather(own, "a checkpoint was written", nbytes=nbytes)
        problems = [each["problem"] for each in reports if each["problem"]]
        result: dict[str, Any] = {"problem": None, "note": None}
        if self.comm.rank == 0:
            if problems:
                self._discard(staged)
                result["note"] = self._newest()
            else:
                result = self._commit(staged, request, request.copy, gathered, reports)
        # Only rank 0 has a result. The round keeps the others from reporting a checkpoint that is
        # not committed yet.
        result = self.channel.all_gather(result, "a checkpoint was completed", nbytes=nbytes)[0]
        if problems or result["problem"]:
            return self._failed(request, problems or [result["problem"]], result["note"])
        return Outcome(note=result["note"])

    # ---- round 1 ----

    def _exchange_catalogues(self, request: Request) -> list[Any]:
        problem, tensors, replicated = request.problem, [], []
        if request.copy is not None:
            replicated = request.copy.replicated
            try:
                tensors = _catalogue(request.copy)
            except Exception as error:  # the other ranks must not wait for this rank
                problem = self._describe(error)
        mine = {
            "problem": problem,
            "step": request.step,
            "nonce": secrets.token_hex(4),
            "metric": request.metric,
            "tensors": tensors,
            "replicated": replicated,
        }
        nbytes = 0 if request.copy is None else request.copy.nbytes
        return self.channel.all_gather(mine, "a checkpoint was begun", nbytes=nbytes)

    # ---- round 2 ----

    def _write_shard(
        self, staged: str, copy: Copy, catalogue: Sequence[TensorEntry], owned: Mapping[str, int]
    ) -> dict[str, Any]:
        """Write this rank's files; return its report for round 2."""
        stem = f"rank{self.comm.rank:04d}"
        described = SavedRank(objects=copy.objects, where=dict(owned), grid=dict(self.grid))
        text = json.dumps(asdict(described), separators=(",", ":")).encode()
        files = {f"{stem}.json": FileEntry(nbytes=len(text), checksum=digest(text))}
        own = in_file_order([entry for entry in catalogue if owned[entry.name] == self.comm.rank])
        header = header_of(own)
        try:
            self.storage.write(staged, f"{stem}.json", [text])
            if own:
                files[f"{stem}.safetensors"] = FileEntry(
                    nbytes=len(header) + sum(entry.nbytes for entry in own),
                    checksum=digest(header),
                    tensors={entry.name: entry.checksum for entry in own},
                )
                self.storage.write(staged, f"{stem}.safetensors", _pieces(header, own, copy))
        except Exception as error:  # reported to all ranks, whatever it is
            return {"problem": self._describe(error), "files": {}}
        return {"problem": None, "files": {name: asdict(entry) for name, entry in files.items()}}

    # ---- round 3 ----

    def _commit(
        self,
        staged: str,
        request: Request,
        copy: Copy,
        gathered: Sequence[Mapping[str, Any]],
        reports: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        try:
            files = {
                name: FileEntry(**entry)
                for report in reports
                for name, entry in report["files"].items()
            }
            self._raise_if_incomplete(staged, files)
            name = name_of(request.step, self.storage.names())
            manifest = Manifest(
                step=request.step,
                world_size=len(gathered),
                route=self.comm.name,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                versions={"torchmn": __version__, "torch": torch.__version__},
                metric=gathered[0]["metric"],
                files=files,
                batches=copy.batches,
            )
            self.storage.commit(staged, name, manifest.to_bytes())
        except Exception as error:
            # Nothing may leave this method as an exception: the other ranks wait in the last round.
            self._discard(staged)
            return {"problem": self._describe(error), "note": self._newest()}
        # `torchmn submit --requeue`, and hosts that join an elastic job, wait for a checkpoint.
        for observer in events.observers:
            observer.checkpoint_saved(request.step)
        record_progress(f"checkpoint of step {request.step}")
        _log.debug("saved the checkpoint of step %d: %s", request.step, name)
        return {"problem": None, "note": self._remove_old(name)}

    def _raise_if_incomplete(self, staged: str, files: Mapping[str, FileEntry]) -> None:
        """Check every file's size as rank 0 sees it: other hosts may have written elsewhere."""
        for name, entry in files.items():
            reader = self.storage.open(staged, name)
            reader.close()
            if reader.nbytes != entry.nbytes:
                raise DataError(f"{name} has {reader.nbytes} of {entry.nbytes} bytes")

    def _remove_old(self, newest: str) -> str | None:
        """Remove checkpoints that are not kept; return a warning if some cannot be removed."""
        failed: list[str] = []
        try:
            names = self.storage.names()
            good, bad = {}, [name for name in names if name.startswith(TEMPORARY)]
            for name in filter(is_checkpoint, names):
                try:
                    if name in self.bad:
                        raise DataError("it was damaged when it was read")
                    good[name] = read_manifest(self.storage, name)
                except DataError:
                    bad.append(name)
            for name in checkpoints_to_delete(good, bad, newest, keep=self.keep, best=self.best):
                try:
                    self.storage.remove(name)
                except OSError as error:
                    failed.append(self._describe(error))
        except OSError as error:
            failed.append(self._describe(error))
        return f"old checkpoints could not be removed: {'; '.join(failed)}." if failed else None

    def _newest(self) -> str | None:
        """Say which checkpoint is the newest that is left, or why none is known."""
        try:
            names = filter(is_checkpoint, self.storage.names())
        except OSError as error:
            return f"earlier checkpoints cannot be seen ({error.strerror or error})"
        newest = max(names, key=order_of, default=None)
        return f"the newest one is {newest}" if newest else "there is no earlier one"

    def _discard(self, staged: str) -> None:
        """Remove a staged checkpoint at once: a full disk may have caused the failure."""
        try:
            if staged in self.storage.names():
                self.storage.remove(staged)
        except OSError:
            return  # the next complete save tries again

    # ---- messages ----

    # Errors travel between ranks as text: the channel carries JSON, and exceptions may not pickle.
    def _describe(self, error: Exception) -> str:
        if isinstance(error, OSError):
            number = "" if error.errno is None else f" (errno {error.errno})"
            place = error.filename or self.storage.folder
            return f"{self.comm.rank_label}: {place}: {error.strerror or error}{number}"
        if isinstance(error, DataError):
            return f"{self.comm.rank_label}: {self.storage.folder}: {error}"
        return f"{self.comm.rank_label}: {type(error).__name__}: {error}"

    def _failed(
        self, request: Request, problems: Sequence[str], newest: str | None = None
    ) -> Outcome:
        aborted = f"the checkpoint of step {request.step} was aborted"
        return Outcome(
            problem=f"{f'{aborted}; {newest}' if newest else aborted}: {'; '.join(problems)}"
        )


def read_manifest(storage: FolderStorage, checkpoint: str) -> Manifest:
    """Read the manifest of a checkpoint. Local. Raises DataError: it has no valid one."""
    with closing(storage.open(checkpoint, MANIFEST)) as reader:
        return parse(read_text(reader, MANIFEST, BEGIN))


def _pieces(
    header: bytes, entries: Sequence[TensorEntry], copy: Copy
) -> Iterator[bytes | memoryview]:
    yield header
    for entry in entries:
        if entry.nbytes:
            yield as_bytes(copy.tensors[entry.name]).numpy().data


def _catalogue(copy: Copy) -> list[list[Any]]:
    """List [name, dtype, shape, checksum, nbytes] of a copy's tensors, for JSON."""
    return [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape), digest(t), t.nbytes]
        for name, t in copy.tensors.items()
    ]


def _disagreement(gathered: Sequence[Mapping[str, Any]], step: int, num_parts: int) -> str | None:
    """Describe how tensors differ between replicas of the same part of a model; None if equal."""
    found = []
    for first in range(num_parts):
        replicas = gathered[first::num_parts]
        common = set(replicas[0]["replicated"]).intersection(
            *(each["replicated"] for each in replicas[1:])
        )
        found += [
            replace(
                each,
                groups=tuple(tuple(first + rank * num_parts for rank in g) for g in each.groups),
            )
            for each in differences(
                [{r[0]: r[3] for r in each["tensors"] if r[0] in common} for each in replicas]
            )
        ]
    return describe_differences(found, step) if found else None


def owners(catalogues: Sequence[Sequence[TensorEntry]]) -> list[dict[str, int]]:
    """Choose the writer of each tensor; return {tensor name: writing rank} for every rank.

    Tensors of several ranks are the same if name, dtype, shape and checksum agree, and are written
    once: by the rank with the fewest bytes so far, large tensors first. All ranks compute the same.
    """
    holders: dict[TensorEntry, list[int]] = {}
    for rank, catalogue in enumerate(catalogues):
        for entry in catalogue:
            holders.setdefault(entry, []).append(rank)
    result: list[dict[str, int]] = [{} for _ in catalogues]
    written_nbytes = [0] * len(catalogues)
    # First tensors that only one rank has; the shared ones then balance the load.
    for entry in sorted(holders, key=lambda e: (len(holders[e]) > 1, -e.nbytes)):
        ranks = holders[entry]
        owner = min(ranks, key=lambda rank: written_nbytes[rank])
        written_nbytes[owner] += entry.nbytes
        for rank in ranks:
            result[rank][entry.name] = owner
    return result
