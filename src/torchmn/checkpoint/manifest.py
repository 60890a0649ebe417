"""The manifest, which makes a folder a checkpoint, with checksums of all its files.

The file is one line of JSON, ``{"checksum":"<sha256 of the rest>","manifest":{...}}``. Its own
checksum covers the bytes of the object that follows, so that no byte can change undetected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmn.communicators.checksums import digest
from torchmn.errors import DataError

FORMAT = 1
_FRAME = re.compile(rb'\{"checksum":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"rank\d{4,}\.(json|safetensors)")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its size, and the checksum of its bytes.

    In a file of tensors ``checksum`` covers the header, and ``tensors`` has the checksum of each
    tensor by name: a rank that reads some of the tensors checks these alone.
    """

    nbytes: int
    checksum: str
    tensors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint. ``metric`` is the value that `Best` compares, or None."""

    step: int
    world_size: int
    route: str
    created: str
    versions: dict[str, str]
    metric: float | None
    files: dict[str, FileEntry]

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
        return Manifest(
            step=_number(body["step"], 0),
            world_size=_number(body["world_size"], 1),
            route=_text(body["route"]),
            created=_text(body["created"]),
            versions={_text(k): _text(v) for k, v in body["versions"].items()},
            metric=None if body["metric"] is None else float(body["metric"]),
            files={_file_name(name): _file(entry) for name, entry in body["files"].items()},
        )
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DataError(
            f"manifest.json is not a valid manifest: {type(error).__name__}: {error}"
        ) from error


def _file(entry: Mapping[str, Any]) -> FileEntry:
    return FileEntry(
        nbytes=_number(entry["nbytes"], 0),
        checksum=_checksum(entry["checksum"]),
        tensors={_text(name): _checksum(sum_) for name, sum_ in entry["tensors"].items()},
    )


def _number(value: object, minimum: int) -> int:
    if type(value) is not int or value < minimum:
        raise ValueError(f"{value!r} is not an integer of at least {minimum}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a string")
    return value


def _checksum(value: object) -> str:
    if not _CHECKSUM.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not a checksum")
    return _text(value)


def _file_name(value: str) -> str:
    if not _FILE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a shard")
    return value
