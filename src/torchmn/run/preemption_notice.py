"""How a host finds out that it will be preempted: a file, or the metadata address of its cloud.

The agent of the first rank of a host asks, in a thread of its own, so that an address that does not
answer costs the training nothing. What it finds goes to its script (`torchmn.Preemption`) and to
the launcher.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torchmn.base.errors import UsageError, raise_if_unknown

_PERIOD_S, _SLOWEST_S = 2.0, 60.0
# Azure may take two minutes for the first answer, which switches the service on.
_ANSWER_S, _AT_START_S = 130.0, 2.0
_TOKEN_S = 21600  # how long a token of AWS is valid
_LINK_LOCAL = "http://169.254.169.254"
_ENDING = ("Preempt", "Terminate", "Redeploy", "Reboot")  # events of Azure
_NO_ANSWER = (OSError, ValueError, LookupError, TypeError)

Notices = Iterator[str]
"""Each item is who says that this host will be preempted, and when; empty if it will not be."""


def _of_file(path: str, limit_s: float) -> Notices:
    while True:
        is_there, first = os.path.exists(path), ""
        with suppress(OSError):  # it is not there, or gone again, or another user's
            first = Path(path).read_text(errors="replace").partition("\n")[0].strip()
        text = f"the file {path} is there" + (f" ({first})" if first else "")
        yield text if is_there else ""


def _of_aws(base: str, limit_s: float) -> Notices:
    """EC2's notice of two minutes for spot instances, by version 2 of its metadata service."""
    life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
    token, _ = _fetch(f"{base}/latest/api/token", life, limit_s, method="PUT")
    until = time.monotonic() + _TOKEN_S / 2
    while time.monotonic() < until:
        address = f"{base}/latest/meta-data/spot/instance-action"
        text, _ = _fetch(address, {"X-aws-ec2-metadata-token": token}, limit_s)
        action = json.loads(text or "{}")  # without the page nothing is announced
        yield f"AWS will {action['action']} it at {action['time']}" if action else ""


def _of_google(base: str, limit_s: float) -> Notices:
    """Compute Engine's notice of 30 seconds; later requests are answered when the value changes."""
    query = ""
    while True:
        address = f"{base}/computeMetadata/v1/instance/preempted{query}"
        text, headers = _fetch(address, {"Metadata-Flavor": "Google"}, limit_s)
        query = f"?wait_for_change=true&timeout_sec=60&last_etag={headers.get('ETag', '')}"
        yield "Google Cloud preempts it" if text.strip() == "TRUE" else ""


def _of_azure(base: str, limit_s: float) -> Notices:
    """Azure's scheduled events, which are those of a whole scale set, 30 seconds before."""
    header = {"Metadata": "true"}
    path = "instance/compute/name?api-version=2021-02-01&format=text"
    name = _fetch(f"{base}/metadata/{path}", header, limit_s)[0].strip()
    while True:
        path = "scheduledevents?api-version=2020-07-01"
        for event in json.loads(_fetch(f"{base}/metadata/{path}", header, limit_s)[0])["Events"]:
            if event["EventType"] in _ENDING and name in event["Resources"]:
                when = event.get("NotBefore") or "now"
                yield f"Azure announces {event['EventType']} of {name}, not before {when}"
        yield ""


_CLOUDS: Mapping[str, tuple[Callable[[str, float], Notices], str]] = {
    "aws": (_of_aws, _LINK_LOCAL),
    "gcp": (_of_google, "http://metadata.google.internal"),
    "azure": (_of_azure, _LINK_LOCAL),
}


def _cloud_and_url(text: str) -> tuple[str, str]:
    """Return the cloud that ``--preemption`` names, "" for a file, and the address to ask."""
    cloud, _, url = text.partition("=")
    if text.startswith("http") or url.startswith("http"):
        raise_if_unknown("cloud of --preemption CLOUD=URL", cloud, _CLOUDS)
        return cloud, url.rstrip("/")
    return (text, _CLOUDS[text][1]) if text in _CLOUDS else ("", text)


def notices(text: str, limit_s: float = _ANSWER_S) -> Notices:
    """Ask what ``--preemption`` names, a cloud, ``CLOUD=URL`` or a file, for each item.

    Each request may take ``limit_s``. The iterator ends after some hours. Raises UnknownNameError:
    the URL is of no known cloud. Its items raise OSError, ValueError, LookupError or TypeError:
    there is no answer, or it has another form.

    >>> next(notices("/run/preempted"))
    ''
    """
    cloud, url = _cloud_and_url(text)
    return (_CLOUDS[cloud][0] if cloud else _of_file)(url, limit_s)


def notice_now(text: str) -> str:
    """Return the notice that this host has already; empty if it has none, or nothing answers."""
    with suppress(*_NO_ANSWER):
        return next(notices(text, _AT_START_S)) if text else ""
    return ""


def checked_source(text: str) -> str:
    """Return ``text``, if it can be asked, with the whole path of a file. Empty if it is empty.

    Raises UsageError: the file is there already. Raises UnknownNameError as `notices`.
    """
    if not text or _cloud_and_url(text)[0]:
        return text
    if os.path.exists(text):
        raise UsageError(
            f"--preemption {text}: the file is there already, so that all ranks would save and "
            "exit after their first steps. Remove it, or name another one."
        )
    return os.path.abspath(text)


class NoticeWatcher:
    """Asks what ``text`` names until there is a notice.

    Its own thread asks, and the thread that owns this object reads.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        # It keeps the bounds of messages, so that the reader never gets half of one.
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A daemon: its request may take minutes, and the agent ends with the script.
        threading.Thread(target=self._run, name="torchmn-preemption", daemon=True).start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `read` has something to return."""
        return self._reader.fileno()

    def read(self) -> tuple[str, str]:
        """Return (notice, problem), one of them empty. Each is reported once."""
        notice, problem = json.loads(self._reader.recv(1 << 16))
        return notice, problem

    def close(self) -> None:
        """Read nothing more; a notice that comes later is lost."""
        self._reader.close()

    def _run(self) -> None:
        pause_s, has_failed = _PERIOD_S, False
        while True:
            try:
                for notice in notices(self._text):
                    if notice:
                        self._send(notice, "")
                        self._writer.close()
                        return
                    pause_s = _PERIOD_S
                    time.sleep(pause_s)
            except _NO_ANSWER as error:
                if not has_failed:
                    where = f"--preemption {self._text} on {socket.gethostname()}"
                    self._send("", f"{where} does not answer: {error}. It is asked again.")
                has_failed, pause_s = True, min(2 * pause_s, _SLOWEST_S)
                time.sleep(pause_s)

    def _send(self, *texts: str) -> None:
        with suppress(OSError):
            self._writer.send(json.dumps([text[:1000] for text in texts]).encode())


def _fetch(
    address: str, headers: dict[str, str], limit_s: float, method: str = "GET"
) -> tuple[str, Mapping[str, str]]:
    """Return text and headers of an answer. No proxy is used: the host itself answers.

    The text is empty where there is no such page.
    """
    from http.client import HTTPException  # here, because few jobs need it
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(address, headers=headers, method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=limit_s) as answer:
            return answer.read(1 << 20).decode(errors="replace"), answer.headers
    except HTTPError as error:
        error.close()  # it is the answer, with an open connection
        if error.code == 404:
            return "", {}
        raise
    except HTTPException as error:
        raise OSError(f"no answer of HTTP ({error!r})") from None
