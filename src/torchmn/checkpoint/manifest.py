"""The manifest, which makes a folder a checkpoint, with checksums of all its files.

The file is one line of JSON, ``{"checksum":"<sha256 of the rest>","manifest":{...}}``. Its own
checksum covers the bytes of the object that follows, so that no byte can change undetected.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated

from msgspec import Meta, MsgspecError, convert

from torchmn.comm.checksums import digest
from torchmn.data.batch_settings import BatchSettings
from torchmn.errors import DataError

FORMAT = 1
BEGIN = b'{"checksum":"'
_FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
FileName = Annotated[str, Meta(pattern=r"^rank[0-9]{4,}\.(json|safetensors)\Z")]
Size = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its size, and the checksum of its bytes.

    In a file of tensors ``checksum`` covers the header, and ``tensors`` has the checksum of each
    tensor by name: a rank that reads some of the tensors checks these alone.
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
        """The file's content."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()
        return b'{"checksum":"%s","manifest":%s}\n' % (digest(body).encode(), body)


def parse(raw: bytes) -> Manifest:
    """Read a manifest. Raises DataError: it is damaged, or of another format."""
    frame = _FRAME.fullmatch(raw)
    if frame is None:
        raise DataError("manifest.json is damaged: it does not have the form of a manifest")
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
