"""The manifest, which makes a folder a checkpoint; names and retention of checkpoints.

The file is one line of JSON, ``{"checksum":"<SHA-256>","manifest":{...}}``. The checksum covers the
bytes of the object that follows it, so that no change goes undetected.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, MsgspecError, convert

from torchmn.base.errors import DataError, UsageError
from torchmn.comm.checksums import digest
from torchmn.data.batch_settings import BatchSettings

FORMAT = 1
BEGIN = b'{"checksum":"'
_FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
FileName = Annotated[str, Meta(pattern=r"^rank[0-9]{4,}\.(json|safetensors)\Z")]
Size = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of one file.

    For a file of tensors ``checksum`` covers the header only, and ``tensors`` has the checksum of
    each tensor by name, so that a rank verifies no more than the tensors that it reads.
    """

    nbytes: Size
    checksum: Checksum
    tensors: dict[str, Checksum] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint. ``metric`` is the value that `Best` compares, or None.

    ``batches`` has the global batch as each object of the state knows it, by the object's name.
    """

    step: Size
    world_size: Annotated[int, Meta(ge=1)]
    route: str
    created: str
    versions: dict[str, str]
    metric: float | None
    files: dict[FileName, FileEntry]
    batches: dict[str, BatchSettings] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Encode the manifest as the content of its file."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()
        return b'{"checksum":"%s","manifest":%s}\n' % (digest(body).encode(), body)


def parse(raw: bytes) -> Manifest:
    """Read a manifest. Raises DataError: it is damaged, or of another format."""
    frame = _FRAME.fullmatch(raw)
    if frame is None:
        raise DataError("manifest.json is damaged: it does not have the form of a manifest")
    # The bytes as they are, not JSON written again: floats and key order need not be reproduced.
    if digest(frame[2]) != frame[1].decode():
        raise DataError("manifest.json is damaged: it does not match its checksum")
    try:
        body = json.loads(frame[2])
        if body["format"] != FORMAT:
            raise DataError(
                f"manifest.json is of format {body['format']!r} and this torchmn reads {FORMAT}"
            )
        return convert(body, Manifest)
    except (MsgspecError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"manifest.json is not a valid manifest: {str(error)[:200]}") from error


# ---- names of checkpoints, and which are kept

TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class Best:
    """Keep the checkpoint with the best value, in addition to the last ones.

    ``key`` is the name in the trainer's observation, such as ``validation/main/accuracy``; in a
    plain loop the value is given to `save`. Raises UsageError: ``mode`` is neither max nor min.

    Example:
        >>> Best("validation/main/accuracy", "max")
        Best(key='validation/main/accuracy', mode='max')
    """

    key: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UsageError(f"mode={self.mode!r} of Best must be 'max' or 'min'.")


def name_of(step: int, taken: Sequence[str]) -> str:
    """The name of a new checkpoint, which follows all names that are taken.

    If training has begun again from an earlier step, checkpoints of this or later steps exist: the
    name then gets the next revision, as in ``step-00000100-2``.
    """
    revision, newest_step = max(map(order_of, filter(is_checkpoint, taken)), default=(1, -1))
    if step <= newest_step:
        revision += 1
    return f"step-{step:08d}" + (f"-{revision}" if revision > 1 else "")


def is_checkpoint(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def order_of(name: str) -> tuple[int, int]:
    """Sort key (revision, step) from a checkpoint's name; the last one saved has the largest."""
    found = _NAME.fullmatch(name)
    return (int(found[2] or 1), int(found[1])) if found else (0, -1)


def checkpoints_to_delete(
    good: Mapping[str, Manifest], bad: Sequence[str], newest: str, *, keep: int, best: Best | None
) -> list[str]:
    """The checkpoints to delete once ``newest`` is complete.

    Kept are ``newest``, the last ``keep`` valid ones and the best valid one. A ``bad`` one
    (incomplete or damaged) does not count, and is deleted when it is older than all that are kept,
    so that it can be examined. Temporary ones are deleted at once: none is being written now.
    """
    ordered = sorted(good, key=order_of)
    kept = {newest, *ordered[-keep:]}
    if best is not None:
        sign = 1 if best.mode == "max" else -1
        rated = [(sign * m.metric, order_of(n), n) for n, m in good.items() if m.metric is not None]
        # Of equal values the newest: names are ordered by revision and step after the metric.
        kept.update(name for _, _, name in sorted(rated)[-1:])
    oldest = min(order_of(name) for name in kept)
    delete = [name for name in ordered if name not in kept]
    return delete + [name for name in bad if name.startswith(TEMPORARY) or order_of(name) < oldest]
