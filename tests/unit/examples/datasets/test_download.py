"""Downloads from a server on this machine: complete and right, or an error and no file."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from examples.datasets.download import download

from torchmn.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """``/file`` whole, ``/short`` half of what was promised, ``/plain`` without a length."""

    def do_GET(self) -> None:
        if self.path not in ("/file", "/short", "/plain"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/plain":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if self.path == "/short" else CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["file", "plain"])
def test_file_is_complete(server: str, tmp_path: Path, path: str) -> None:
    calls: list[None] = []
    into = tmp_path / "new" / "file"
    download(f"{server}/{path}", into, md5=MD5, heartbeat=lambda: calls.append(None))
    assert into.read_bytes() == CONTENT
    assert [entry.name for entry in into.parent.iterdir()] == ["file"]
    assert len(calls) >= 4


@pytest.mark.parametrize(
    ("path", "md5", "message"),
    [
        ("file", "0" * 32, rf"has the md5 sum {MD5} and should have 0000"),
        ("short", MD5, r"ended after 512,000 of 1,024,000 bytes"),
        ("missing", MD5, "404"),
    ],
)
def test_failure_leaves_no_file(
    server: str, tmp_path: Path, path: str, md5: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        download(f"{server}/{path}", tmp_path / "file", md5=md5)
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_old_file(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(DataError):
        download(f"{server}/short", tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://host/file", "host/file"])
def test_unsupported_scheme(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be downloaded. The address must begin"):
        download(url, tmp_path / "file", md5=MD5)
