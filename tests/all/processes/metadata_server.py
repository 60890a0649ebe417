"""A metadata service as AWS has it, on this host's loopback: PORT FILE. FILE makes the notice."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self._answer(200, b"token")

    def do_GET(self) -> None:
        known = self.headers["X-aws-ec2-metadata-token"] == "token"
        if not known or self.path != "/latest/meta-data/spot/instance-action":
            self._answer(400, b"")
        elif Path(sys.argv[2]).exists():
            self._answer(200, b'{"action": "terminate", "time": "2027-01-02T08:22:00Z"}')
        else:
            self._answer(404, b"")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
