"""Writing one checkpoint, all ranks together: what a thread does behind the training.

    1. every rank sums its copy and tells the others what it has; all see who writes what
    2. every rank writes its shard into the draft, and tells whether it could
    3. rank 0 looks at all files, adds the manifest, makes the draft a checkpoint, removes old ones

A rank that fails at any point says so in the next round, and the draft is given up on all ranks.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from torchmn.checkpoint.control_channel import ControlChannel
from torchmn.checkpoint.manifest import FileEntry, Manifest, parse
from torchmn.checkpoint.retention import DRAFT, Best, checkpoints_to_delete, is_checkpoint, name_of
from torchmn.checkpoint.shard_assignment import owners
from torchmn.checkpoint.shard_file import TensorEntry, header_of, in_file_order
from torchmn.checkpoint.snapshot import Copy
from torchmn.checkpoint.storage import MANIFEST, Storage
from torchmn.communicators.checksums import describe_differences, differences, digest
from torchmn.communicators.object_codec import as_bytes
from torchmn.errors import DataError
from torchmn.version import __version__

_MOST_MANIFEST_NBYTES = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be saved; ``problem`` in place of a copy where this rank could not make one."""

    step: int
    copy: Copy | None
    metric: float | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What has become of it, the same on all ranks but for the own figures.

    ``problem`` says why there is no checkpoint, ``disagreement`` how replicas differ, ``note`` what
    else went wrong.
    """

    step: int
    name: str | None = None
    problem: str | None = None
    disagreement: str | None = None
    note: str | None = None
    written_nbytes: int = 0
    written_s: float = 0.0


@dataclass(kw_only=True)
class Writer:
    """Writes for one rank. ``bad`` are checkpoints that were found damaged when reading.

    ``announce`` is called on rank 0 with the step of a checkpoint that is finished.
    """

    rank: int
    rank_label: str
    route: str
    storage: Storage
    where: str
    agreement: ControlChannel
    keep: int
    best: Best | None
    gives_up_on_difference: bool
    announce: Callable[[int], None] = lambda _: None
    bad: set[str] = field(default_factory=set)

    def write(self, request: Request) -> Outcome:
        """Write it. *Collective*, on the thread that does the agreeing.

        Raises CommunicationError: another rank was lost; there is no checkpoint then.
        """
        began_s = time.monotonic()
        said = self._tell_what_there_is(request)
        problems = [each["problem"] for each in said if each["problem"]]
        steps = sorted({each["step"] for each in said})
        if not problems and len(steps) > 1:
            problems = [f"the ranks save different steps: {[each['step'] for each in said]}"]
        if problems or request.copy is None:
            return self._failed(request, problems)
        astray = _disagreement(said, request.step)
        if astray and self.gives_up_on_difference:
            return Outcome(step=request.step, disagreement=astray)
        catalogues = [[_entry(row) for row in each["tensors"]] for each in said]
        owned = owners(catalogues)
        draft = f"{DRAFT}{request.step:08d}-{said[0]['nonce']}"
        told = self._write_shard(draft, request.copy, catalogues[self.rank], owned[self.rank])
        nbytes = sum(entry.nbytes for catalogue in catalogues for entry in catalogue)
        reports = self.agreement.all_gather(told, "a checkpoint was written", nbytes=nbytes)
        problems = [each["problem"] for each in reports if each["problem"]]
        result: dict[str, Any] = {"problem": None, "name": None, "note": None}
        if self.rank == 0:
            if problems:
                self._give_up(draft)
            else:
                result = self._commit(draft, request, said, reports)
        result = self.agreement.all_gather(result, "a checkpoint was completed", nbytes=nbytes)[0]
        if problems or result["problem"]:
            return self._failed(request, problems or [result["problem"]])
        return Outcome(
            step=request.step,
            name=result["name"],
            disagreement=astray,
            note=result["note"],
            written_nbytes=sum(file["nbytes"] for file in told["files"].values()),
            written_s=time.monotonic() - began_s,
        )

    # ---- round 1 ----

    def _tell_what_there_is(self, request: Request) -> list[Any]:
        problem, tensors, promised = request.problem, [], []
        if request.copy is not None:
            promised = request.copy.promised
            try:
                tensors = _catalogue(request.copy)
            except Exception as error:  # the other ranks must not wait for this one
                problem = self._words(error)
        mine = {
            "problem": problem,
            "step": request.step,
            "nonce": secrets.token_hex(4),
            "metric": request.metric,
            "tensors": tensors,
            "promised": promised,
        }
        nbytes = 0 if request.copy is None else request.copy.nbytes
        return self.agreement.all_gather(mine, "a checkpoint was begun", nbytes=nbytes)

    # ---- round 2 ----

    def _write_shard(
        self, draft: str, copy: Copy, catalogue: Sequence[TensorEntry], owned: Mapping[str, int]
    ) -> dict[str, Any]:
        """This rank's files; returns what round 2 says of them."""
        stem = f"rank{self.rank:04d}"
        described = {label: asdict(saved) for label, saved in copy.objects.items()}
        text = json.dumps({"objects": described, "where": owned}, separators=(",", ":")).encode()
        files = {f"{stem}.json": FileEntry(nbytes=len(text), checksum=digest(text))}
        own = in_file_order([entry for entry in catalogue if owned[entry.name] == self.rank])
        header = header_of(own)
        try:
            self.storage.write(draft, f"{stem}.json", [text])
            if own:
                files[f"{stem}.safetensors"] = FileEntry(
                    nbytes=len(header) + sum(entry.nbytes for entry in own),
                    checksum=digest(header),
                    tensors={entry.name: entry.checksum for entry in own},
                )
                self.storage.write(draft, f"{stem}.safetensors", _pieces(header, own, copy))
        except Exception as error:  # all ranks learn of it, whatever it is
            return {"problem": self._words(error), "files": {}}
        return {"problem": None, "files": {name: asdict(entry) for name, entry in files.items()}}

    # ---- round 3 ----

    def _commit(
        self,
        draft: str,
        request: Request,
        said: Sequence[Mapping[str, Any]],
        reports: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        try:
            files = {
                name: FileEntry(**entry)
                for report in reports
                for name, entry in report["files"].items()
            }
            if self.storage.sees_all_ranks:
                self._raise_if_not_all_here(draft, files)
            name = name_of(request.step, self.storage.names())
            manifest = Manifest(
                step=request.step,
                world_size=len(said),
                route=self.route,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                versions={"torchmn": __version__, "torch": torch.__version__},
                metric=said[0]["metric"],
                files=files,
            )
            self.storage.commit(draft, name, manifest.to_bytes())
        except Exception as error:
            self._give_up(draft)
            return {"problem": self._words(error), "name": None, "note": None}
        self.announce(request.step)
        return {"problem": None, "name": name, "note": self._remove_old(name)}

    def _raise_if_not_all_here(self, draft: str, files: Mapping[str, FileEntry]) -> None:
        """Look at every file from here: ranks of other hosts may write elsewhere."""
        for name, entry in files.items():
            reader = self.storage.open(draft, name)
            reader.close()
            if reader.nbytes != entry.nbytes:
                raise DataError(f"{name} has {reader.nbytes} of {entry.nbytes} bytes")

    def _remove_old(self, newest: str) -> str | None:
        """Remove what need not stay; returns a sentence if that fails."""
        try:
            names = self.storage.names()
            good, bad = {}, [name for name in names if name.startswith(DRAFT)]
            for name in filter(is_checkpoint, names):
                try:
                    if name in self.bad:
                        raise DataError("it was found damaged when it was read")
                    good[name] = read_manifest(self.storage, name)
                except DataError:
                    bad.append(name)
            for name in checkpoints_to_delete(good, bad, newest, keep=self.keep, best=self.best):
                self.storage.remove(name)
        except OSError as error:
            return f"{self.rank_label}: old checkpoints could not be removed: {self._words(error)}."
        return None

    def _give_up(self, draft: str) -> None:
        """Free the space: it may be what was missing."""
        try:
            if draft in self.storage.names():
                self.storage.remove(draft)
        except OSError:
            return  # the next complete save tries again

    # ---- words ----

    def _words(self, error: Exception) -> str:
        if isinstance(error, OSError):
            number = "" if error.errno is None else f" (errno {error.errno})"
            place = error.filename or self.where
            return f"{self.rank_label}: {place}: {error.strerror or error}{number}"
        if isinstance(error, DataError):
            return f"{self.rank_label}: {self.where}: {error}"
        return f"{self.rank_label}: {type(error).__name__}: {error}"

    def _failed(self, request: Request, problems: Sequence[str]) -> Outcome:
        text = "; ".join(problems)
        return Outcome(
            step=request.step,
            problem=f"the checkpoint of step {request.step} was given up and those before it stay: "
            f"{text}",
        )


def read_manifest(storage: Storage, checkpoint: str) -> Manifest:
    """The manifest of a checkpoint. Local. Raises DataError: it has none that is valid."""
    reader = storage.open(checkpoint, MANIFEST)
    try:
        if reader.nbytes > _MOST_MANIFEST_NBYTES:
            raise DataError(f"{MANIFEST} has {reader.nbytes} bytes")
        raw = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(raw))
    finally:
        reader.close()
    return parse(bytes(raw))


def _pieces(
    header: bytes, entries: Sequence[TensorEntry], copy: Copy
) -> Iterator[bytes | memoryview]:
    yield header
    for entry in entries:
        if entry.nbytes:
            yield as_bytes(copy.tensors[entry.name]).numpy().data


def _catalogue(copy: Copy) -> list[list[Any]]:
    return [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape), digest(t), t.nbytes]
        for name, t in copy.tensors.items()
    ]


def _entry(row: Sequence[Any]) -> TensorEntry:
    name, dtype, shape, checksum, nbytes = row
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), checksum=checksum, nbytes=nbytes)


def _disagreement(said: Sequence[Mapping[str, Any]], step: int) -> str | None:
    """A sentence if tensors differ that all ranks promise to be equal."""
    common = set(said[0]["promised"]).intersection(*(each["promised"] for each in said[1:]))
    found = differences(
        [{row[0]: row[3] for row in each["tensors"] if row[0] in common} for each in said]
    )
    return describe_differences(found, step) if found else None
