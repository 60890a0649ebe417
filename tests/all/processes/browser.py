"""A headless Chromium, driven over the WebDriver protocol."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.limits import limit

PATIENCE_S = 60
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--hide-scrollbars",
)


class Browser:
    """One window."""

    def __init__(self, address: str, binary: str, profile: Path) -> None:
        self._session = address
        options = {"binary": binary, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"{address}/session/{made['sessionId']}"

    def _call(self, method: str, path: str, content: object = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._session}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=limit(PATIENCE_S)) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def open(self, path: Path, *, width: int, height: int = 900) -> None:
        """Show a file in a window of this width, as a telephone's or a screen's."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def _devtools(self, command: str, parameters: object) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def run(self, script: str) -> Any:
        """What a function with this body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the browser."""
        self._call("DELETE", "")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile; skips the test where there is none."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip(reason="no chromium with chromedriver (Debian: chromium, chromium-driver)")
    process = subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = next(text for text in process.stdout if "successfully on port" in text)
        port = int(line.split("on port")[1].strip(" .\n"))
        window = Browser(f"http://127.0.0.1:{port}", binary, profile)
        try:
            yield window
        finally:
            window.close()
    finally:
        process.terminate()
        process.communicate()
