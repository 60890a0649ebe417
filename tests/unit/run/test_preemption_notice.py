"""Notices of preemption: a file, and the metadata addresses of clouds, by a server on loopback."""

import json
import select
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.limits import limit
from torchmn.errors import UnknownNameError, UsageError
from torchmn.run.preemption_notice import (
    NoticeWatcher,
    checked_source,
    notice_now,
    notices,
)


class Cloud(ThreadingHTTPServer):
    """A metadata service: answers by path, and the requests that it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, str]] = {}
        self.required: dict[str, str] = {}
        self.requests: list[str] = []
        self.changed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def do_GET(self) -> None:
        cloud = self.server
        path, _, query = self.path.partition("?")
        cloud.requests.append(f"{self.command} {self.path}")
        if any(self.headers.get(name) != text for name, text in cloud.required.items()):
            self._answer(401, "")
            return
        if "wait_for_change=true" in query:
            assert cloud.changed.wait(limit(30))
        self._answer(*cloud.answers.get(path, (404, "")))

    def do_PUT(self) -> None:
        self.server.requests.append(f"PUT {self.path}")
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "token-1")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("ETag", f"etag-{text}")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which must not be asked
    server = Cloud()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.changed.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_aws_by_a_token(cloud: Cloud) -> None:
    cloud.required = {"X-aws-ec2-metadata-token": "token-1"}
    source = notices(f"aws={cloud.url}")
    assert next(source) == ""
    text = json.dumps({"action": "terminate", "time": "2027-01-02T08:22:00Z"})
    cloud.answers["/latest/meta-data/spot/instance-action"] = (200, text)
    assert next(source) == "AWS will terminate it at 2027-01-02T08:22:00Z"
    assert [each for each in cloud.requests if "PUT" in each] == ["PUT /latest/api/token"]


def test_aws_a_token_that_is_no_longer_valid(cloud: Cloud) -> None:
    source = notices(f"aws={cloud.url}")
    assert next(source) == ""
    cloud.required = {"X-aws-ec2-metadata-token": "another"}
    with pytest.raises(OSError, match="401"):
        next(source)
    cloud.required = {}
    assert next(notices(f"aws={cloud.url}")) == ""
    assert cloud.requests.count("PUT /latest/api/token") == 2


def test_google_answers_when_the_value_changes(cloud: Cloud) -> None:
    path = "/computeMetadata/v1/instance/preempted"
    cloud.required = {"Metadata-Flavor": "Google"}
    cloud.answers[path] = (200, "FALSE")
    source = notices(f"gcp={cloud.url}/")
    assert next(source) == ""
    cloud.answers[path] = (200, "TRUE")
    timer = threading.Timer(0.2, cloud.changed.set)
    timer.start()
    assert next(source) == "Google Cloud preempts it"
    timer.join()
    assert cloud.requests == [
        f"GET {path}",
        f"GET {path}?wait_for_change=true&timeout_sec=60&last_etag=etag-FALSE",
    ]


def test_azure_counts_the_events_of_this_machine_that_end_it(cloud: Cloud) -> None:
    cloud.required = {"Metadata": "true"}
    cloud.answers["/metadata/instance/compute/name"] = (200, "vm-3")
    events = [
        {"EventType": "Preempt", "Resources": ["vm-2"], "NotBefore": ""},
        {"EventType": "Freeze", "Resources": ["vm-3"], "NotBefore": ""},
    ]
    source = notices(f"azure={cloud.url}")
    cloud.answers["/metadata/scheduledevents"] = (200, json.dumps({"Events": events}))
    assert next(source) == ""
    when = "Mon, 19 Sep 2027 18:29:47 GMT"
    events += [{"EventType": "Preempt", "Resources": ["vm-3"], "NotBefore": when}]
    cloud.answers["/metadata/scheduledevents"] = (200, json.dumps({"Events": events}))
    assert next(source) == f"Azure announces Preempt of vm-3, not before {when}"


def test_a_file_with_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    source = notices(str(path))
    assert next(source) == ""
    path.touch()
    assert next(source) == f"the file {path} is there"
    path.write_text("maintenance at noon\nmore\n")
    assert next(source) == f"the file {path} is there (maintenance at noon)"


def test_a_file_that_is_gone_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: True)
    assert next(notices(str(tmp_path / "stop"))) == f"the file {tmp_path / 'stop'} is there"


def test_what_can_be_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="aws"):
        notices("oracle=http://169.254.169.254")
    with pytest.raises(UnknownNameError, match="gcp"):
        notices("http://169.254.169.254/latest")
    monkeypatch.chdir(tmp_path)
    assert checked_source("") == ""
    assert checked_source("aws") == "aws"
    assert checked_source("stop") == str(tmp_path / "stop")  # agents have other working folders
    Path("stop").touch()
    with pytest.raises(UsageError, match="stop: the file is there already.* Remove it"):
        checked_source("stop")


def next_of(watcher: NoticeWatcher) -> tuple[str, str]:
    assert select.select([watcher], [], [], limit(30))[0]
    return watcher.read()


def test_a_token_is_renewed_in_time(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterator ends before the token does, and the watcher makes another one."""
    source = notices(f"aws={cloud.url}")
    assert next(source) == ""
    now = time.monotonic()
    monkeypatch.setattr("torchmn.run.preemption_notice.time.monotonic", lambda: now + 11_000)
    assert next(source, None) is None


def test_an_address_that_does_not_answer_is_reported_once(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again, with growing pauses, and a later notice arrives."""
    pauses: list[float] = []
    plain_sleep = time.sleep

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        plain_sleep(0.01)

    monkeypatch.setattr("torchmn.run.preemption_notice.time.sleep", sleep)
    path = "/latest/meta-data/spot/instance-action"
    cloud.answers[path] = (200, "no JSON")
    watcher = NoticeWatcher(f"aws={cloud.url}")
    notice, problem = next_of(watcher)
    assert notice == ""
    assert f"--preemption aws={cloud.url} on " in problem
    assert "does not answer: " in problem
    deadline = time.monotonic() + limit(30)
    while len(pauses) < 6:
        assert time.monotonic() < deadline
        plain_sleep(0.01)
    assert pauses[:6] == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert not select.select([watcher], [], [], 0)[0]
    cloud.answers[path] = (200, '{"action": "stop", "time": "soon"}')
    assert next_of(watcher) == ("AWS will stop it at soon", "")
    watcher.close()


def test_a_host_that_has_a_notice_already(tmp_path: Path) -> None:
    assert notice_now("") == ""
    assert notice_now(str(tmp_path / "stop")) == ""
    assert notice_now("aws=http://127.0.0.1:1") == ""  # nothing listens there
    (tmp_path / "stop").touch()
    assert notice_now(str(tmp_path / "stop")) == f"the file {tmp_path / 'stop'} is there"
