"""Download one file, with a checksum and a progress bar, completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from torchmn.cluster.units import KiB
from torchmn.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress

_CHUNK_BYTES = 256 * KiB
_TIMEOUT_S = 30.0


def download(
    url: str,
    path: Path,
    *,
    md5: str,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Fetch ``url`` to ``path``, whose folder is created if it is missing.

    The file appears under its name when it is complete and its checksum is right. The bar is shown
    on stderr if that is a terminal. ``heartbeat`` is called after every chunk.

    Raises:
        UsageError: the address is not http or https.
        DataError: no connection, another status than 200, too short, another checksum, no room.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url} cannot be downloaded. The address must begin with https://.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error}. Choose another --data-root."
        ) from error
    part = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            seen = _fetch(url, file.write, heartbeat)
            file.flush()
            os.fsync(file.fileno())
        if seen != md5:
            raise DataError(
                f"The file from {url} has the md5 sum {seen} and should have {md5}. It was "
                "discarded: try again, or fetch the file in another way and pass its folder as "
                "--data-root."
            )
        part.chmod(0o644)
        part.replace(path)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{url} could not be fetched to {path}: {error or type(error).__name__}. Try again, or "
            "fetch the file in another way and pass its folder as --data-root."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _fetch(url: str, write: Callable[[bytes], object], heartbeat: Callable[[], None]) -> str:
    """Write the content of ``url`` and return its md5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    request = Request(url, headers={"User-Agent": "torchmn"})
    with contextlib.ExitStack() as stack:
        response = stack.enter_context(urlopen(request, timeout=_TIMEOUT_S))
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        progress = stack.enter_context(_progress_bar())
        task = progress.add_task(url.rsplit("/", 1)[-1], total=total)
        num_bytes = 0
        while chunk := response.read(_CHUNK_BYTES):
            write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
            progress.update(task, completed=num_bytes)
            heartbeat()
    if total is not None and num_bytes < total:
        raise OSError(f"the connection ended after {num_bytes:,} of {total:,} bytes")
    return digest.hexdigest()


def _progress_bar() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
