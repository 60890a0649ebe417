"""What to read from CTF text, as its parsers need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchmn.cntk.readers.streams import StreamDef, StreamInformation
from torchmn.errors import UsageError

Array = np.ndarray[Any, Any]

_MAX_DIMENSION = 2**31 - 1


class Inputs(NamedTuple):
    """The inputs that streams read, as the parsers need them.

    The name of input s is ``names[bounds[s]:bounds[s + 1]]``; ``dims[s]`` are the values of a
    sample.
    """

    names: Array
    bounds: Array
    is_sparse: Array
    dims: Array


@dataclass(frozen=True)
class Columns:
    """The streams of a file. ``defining`` is the number of that which defines the minibatch size.

    ``fields`` are the names in the file.
    """

    infos: tuple[StreamInformation, ...]
    fields: tuple[str, ...]
    inputs: Inputs
    max_lengths: tuple[int, ...]
    defining: int | None

    def samples_of(self, counts: Array) -> Array:
        """The samples of each sequence, as the minibatch size counts them; at least one."""
        one = slice(None) if self.defining is None else slice(self.defining, self.defining + 1)
        samples: Array = counts[:, one].max(axis=1, initial=1)
        return samples


def columns_of(streams: Mapping[str, StreamDef]) -> Columns:
    """Check the streams. Raises UsageError: one has no shape, or what text cannot have."""
    if not streams:
        raise UsageError("CTFDeserializer without streams: pass StreamDefs(name=StreamDef(...)).")
    infos, fields = [], []
    for number, (name, stream) in enumerate(streams.items()):
        field = name if stream.field is None else stream.field
        raw = field.encode()
        if not raw or raw.startswith(b"#") or any(byte in b" \t\r\n|" for byte in raw):
            raise UsageError(
                f"The field {field!r} of the stream {name!r} cannot be an input of a CTF file: it "
                "must have no blanks, no '|' and no '#' at its beginning."
            )
        if field in fields:
            raise UsageError(f"Two streams read the input {field!r}. Read it once.")
        for option in ("transforms", "context", "scp", "mlf", "broadcast"):
            if getattr(stream, option):
                raise UsageError(
                    f"The stream {name!r} of a CTF file has {option}, which text has not."
                )
        shape = stream.sample_shape
        if not shape:
            raise UsageError(
                f"The stream {name!r} has no shape. StreamDef(shape=...) says how many values a "
                "sample has."
            )
        if math.prod(shape) > _MAX_DIMENSION:
            raise UsageError(
                f"The stream {name!r} has {math.prod(shape)} values in a sample, more than "
                f"{_MAX_DIMENSION}."
            )
        infos.append(
            StreamInformation(
                name,
                number,
                "sparse" if stream.is_sparse else "dense",
                np.float32,
                shape,
                stream.defines_mb_size,
            )
        )
        fields.append(field)
    defining = [number for number, info in enumerate(infos) if info.defines_mb_size]
    if len(defining) > 1:
        raise UsageError(
            "More than one stream has defines_mb_size: "
            f"{', '.join(repr(infos[number].name) for number in defining)}. Choose one."
        )
    raw_names = [field.encode() for field in fields]
    inputs = Inputs(
        np.frombuffer(b"".join(raw_names), np.uint8),
        np.cumsum([0, *map(len, raw_names)], dtype=np.int64),
        np.array([info.is_sparse for info in infos]),
        np.array([math.prod(info.shape) for info in infos], np.int64),
    )
    return Columns(
        tuple(infos),
        tuple(fields),
        inputs,
        tuple(stream.max_sequence_length for stream in streams.values()),
        defining[0] if defining else None,
    )
