"""A server of small archives, in place of the official addresses."""

import functools
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from examples.datasets import images as module

from tests.unit.examples.datasets.makers import cifar_archive, write_mnist_folder


class QuietHandler(SimpleHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server of small files that count as the official ones, and the requested paths."""
    served = write_mnist_folder(tmp_path / "served", is_packed=True)
    (served / "cifar-10-binary.tar.gz").write_bytes(cifar_archive("binary"))
    for name, files in module.IMAGE_FILES.items():
        sums = {
            file: hashlib.md5((served / file).read_bytes()).hexdigest() for file in files.md5_sums
        }
        monkeypatch.setitem(module.IMAGE_FILES, name, replace(files, md5_sums=sums))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    requests: list[str] = []
    handler = type("Handler", (QuietHandler,), {"requests": requests})
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(served))
    ) as answering:
        thread = threading.Thread(target=answering.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{answering.server_port}/", requests
        answering.shutdown()
        thread.join()
