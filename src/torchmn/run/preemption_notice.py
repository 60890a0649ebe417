"""How a host finds out that it will be preempted: a file, or the metadata address of its cloud.

The agent of the first rank of a host asks, in a thread of its own, so that an address that does not
answer costs the training nothing. What it finds goes to its script (`torchmn.Preemption`) and to
the launcher.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torchmn.base.errors import UsageError, raise_if_unknown

_LINK_LOCAL = "http://169.254.169.254"
_SLOWEST_S = 60.0
# Azure may take two minutes for the first answer, which switches the service on.
_ANSWER_S = 130.0
_AT_START_S = 2.0
_TOKEN_S = 21600  # how long a token of AWS is valid


class Source(Protocol):
    """Knows whether this host will be preempted."""

    period_s: float
    """The time between two questions."""

    def ask(self, limit_s: float = _ANSWER_S) -> str:
        """Return who says that this host will be preempted, and when; empty if it will not be.

        Raises OSError or ValueError: there is no answer, or it has another form.
        """


class FileSource:
    """A file that appears when the host will be preempted; its first line may say why.

    >>> FileSource("/run/preempted").ask()
    ''
    """

    period_s = 1.0

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def ask(self, limit_s: float = _ANSWER_S) -> str:
        """See `Source.ask`."""
        if not self._path.exists():
            return ""
        lines = self._path.read_text(errors="replace").splitlines()
        first = lines[0].strip() if lines else ""
        return f"the file {self._path} is there" + (f" ({first})" if first else "")


class AwsSource:
    """EC2's notice of two minutes for spot instances, by version 2 of its metadata service."""

    period_s = 5.0

    def __init__(self, base: str) -> None:
        self._base = base
        self._token, self._token_until = "", 0.0

    def ask(self, limit_s: float = _ANSWER_S) -> str:
        """See `Source.ask`."""
        if time.monotonic() > self._token_until:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            address = f"{self._base}/latest/api/token"
            self._token, _ = _fetch(address, life, limit_s, method="PUT")
            self._token_until = time.monotonic() + _TOKEN_S / 2
        address = f"{self._base}/latest/meta-data/spot/instance-action"
        try:
            text, _ = _fetch(address, {"X-aws-ec2-metadata-token": self._token}, limit_s)
        except OSError as error:
            if getattr(error, "code", 0) == 404:  # nothing is announced
                return ""
            self._token_until = 0.0
            raise
        action = _fields(json.loads(text))
        return f"AWS will {action['action']} it at {action['time']}"


class GoogleSource:
    """Compute Engine's notice of 30 seconds; the request is answered when the value changes."""

    period_s = 1.0

    def __init__(self, base: str) -> None:
        self._base = base
        self._known = ""  # the etag of the value that was seen last

    def ask(self, limit_s: float = _ANSWER_S) -> str:
        """See `Source.ask`."""
        wait = f"?wait_for_change=true&timeout_sec=60&last_etag={self._known}"
        address = f"{self._base}/computeMetadata/v1/instance/preempted"
        address += wait if self._known else ""
        text, headers = _fetch(address, {"Metadata-Flavor": "Google"}, limit_s)
        self._known = headers.get("ETag", "")
        return "Google Cloud preempts it" if text.strip() == "TRUE" else ""


class AzureSource:
    """Azure's scheduled events that end this machine, which are announced 30 seconds before."""

    period_s = 1.0
    _ENDING = ("Preempt", "Terminate", "Redeploy", "Reboot")

    def __init__(self, base: str) -> None:
        self._base = f"{base}/metadata"
        self._name = ""

    def ask(self, limit_s: float = _ANSWER_S) -> str:
        """See `Source.ask`. The events are those of a whole scale set: this machine's count."""
        if not self._name:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            self._name = self._get(path, limit_s).strip()
        text = self._get("scheduledevents?api-version=2020-07-01", limit_s)
        events = _fields(json.loads(text))
        for event in map(_fields, events["Events"]):
            if event["EventType"] in self._ENDING and self._name in event["Resources"]:
                when = event.get("NotBefore") or "now"
                return f"Azure announces {event['EventType']} of {self._name}, not before {when}"
        return ""

    def _get(self, path: str, limit_s: float) -> str:
        return _fetch(f"{self._base}/{path}", {"Metadata": "true"}, limit_s)[0]


_CLOUDS: Mapping[str, tuple[Callable[[str], Source], str]] = {
    "aws": (AwsSource, _LINK_LOCAL),
    "gcp": (GoogleSource, "http://metadata.google.internal"),
    "azure": (AzureSource, _LINK_LOCAL),
}


def source_of(text: str) -> Source:
    """Return the source that ``--preemption`` names: a cloud, ``CLOUD=URL``, or a file.

    Raises UnknownNameError: the URL is of no known cloud.
    """
    cloud, _, url = text.partition("=")
    if text.startswith("http") or url.startswith("http"):
        raise_if_unknown("cloud of --preemption CLOUD=URL", cloud, _CLOUDS)
    if cloud in _CLOUDS and (not url or url.startswith("http")):
        make, usual = _CLOUDS[cloud]
        return make(url.rstrip("/") or usual)
    return FileSource(text)


def checked_source(text: str) -> str:
    """Return ``text``, if it can be a source, with the whole path of a file. Empty if it is empty.

    Raises UsageError: the file is there already. Raises UnknownNameError as `source_of`.
    """
    source = source_of(text) if text else None
    if isinstance(source, FileSource) and Path(text).exists():
        raise UsageError(
            f"--preemption {text}: the file is there already, so that all ranks would save and "
            "exit after their first steps. Remove it, or name another one."
        )
    return os.path.abspath(text) if isinstance(source, FileSource) else text


class NoticeWatcher:
    """Asks the source that ``text`` names until there is a notice.

    Its own thread asks, and the thread that owns this object reads.
    """

    def __init__(self, text: str) -> None:
        self._source, self._name = source_of(text), text
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._run, name="torchmn-preemption", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `read` has something to return."""
        return self._reader.fileno()

    def read(self) -> tuple[str, str]:
        """Return (notice, problem), one of them empty. Each is reported once."""
        is_notice, text = json.loads(self._reader.recv(1 << 16))
        return (text, "") if is_notice else ("", text)

    def close(self) -> None:
        """Read nothing more; a notice that comes later is lost."""
        self._reader.close()

    def _run(self) -> None:
        pause_s, has_failed = self._source.period_s, False
        while True:
            try:
                notice = self._source.ask()
                pause_s = self._source.period_s
            except (OSError, ValueError, KeyError, TypeError) as error:
                notice, pause_s = "", min(2 * pause_s, _SLOWEST_S)
                if not has_failed:
                    has_failed = True
                    where = f"--preemption {self._name} on {socket.gethostname()}"
                    self._report(False, f"{where} does not answer: {error}. It is asked again.")
            if notice:
                self._report(True, notice)
                self._writer.close()
                return
            time.sleep(pause_s)

    def _report(self, is_notice: bool, text: str) -> None:
        with suppress(OSError):
            self._writer.send(json.dumps([is_notice, text[:1000]]).encode())


def notice_now(text: str) -> str:
    """Return the notice that this host has already; empty if it has none, or nothing answers."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return source_of(text).ask(_AT_START_S) if text else ""
    return ""


def _fetch(
    address: str, headers: dict[str, str], limit_s: float, method: str = "GET"
) -> tuple[str, Mapping[str, str]]:
    """Return text and headers of an answer. No proxy is used: the host itself answers."""
    from http.client import HTTPException  # here, because few jobs need it
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(address, headers=headers, method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=limit_s) as answer:
            return answer.read(1 << 20).decode(errors="replace"), answer.headers
    except HTTPError as error:
        error.close()  # it is the answer, with an open connection
        raise
    except HTTPException as error:
        raise OSError(f"no answer of HTTP ({error!r})") from None


def _fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the answer is {value!r}"[:200])
    return value
