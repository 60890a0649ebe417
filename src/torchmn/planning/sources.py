"""What `torchmn plan` is given: folders of recorded runs, or a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from torchmn.errors import UsageError
from torchmn.planning.description import CodecTime, Description, read_description
from torchmn.planning.run_facts import describe_runs


def known_of(paths: Sequence[Path], *, times_codecs: bool = False) -> Description:
    """All that these files or folders say. ``times_codecs``: time every codec on this machine.

    Raises UsageError, DataError: they cannot be used.
    """
    files = [path for path in paths if path.suffix in (".toml", ".json")]
    folders = [path for path in paths if path not in files]
    if len(files) > 1 or (files and folders):
        raise UsageError("Give either one description, or the folders of recorded runs.")
    known = read_description(files[0]) if files else describe_runs(folders)
    return with_timed_codecs(known) if times_codecs else known


def with_timed_codecs(known: Description) -> Description:
    """The description with the codecs timed on the CPU of this machine."""
    import torch

    from torchmn.compression import CODECS, create_codec
    from torchmn.compression.codec_timing import measure_codec

    torch.set_num_threads(1)
    codecs = dict(known.codecs)
    for name in CODECS:
        speed = measure_codec(create_codec(name), torch.device("cpu"))
        if name != "float32" and speed.encode_s < float("inf"):
            codecs[name] = CodecTime(**asdict(speed))
    return msgspec.structs.replace(known, codecs=codecs)
