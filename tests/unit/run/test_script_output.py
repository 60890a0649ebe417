"""What waits when the supervisor does not show it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from pathlib import Path

import pytest

from torchmn.control.connection import Channel
from torchmn.control.messages import Output
from torchmn.run import script_output
from torchmn.run.script_output import ScriptOutput

NUM_LINES = 150_000
TEXT = "".join(f"line {i}\n" for i in range(NUM_LINES)).encode()


class Script:
    """A script that writes as much as is read, and the supervisor's end of the connection."""

    def __init__(self, path: Path) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = Channel(theirs)
        self.channel = Channel(ours)
        self.output = ScriptOutput(path, self.channel, wants_refreshes=False)
        self.output.open_log()
        reading, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.output.follow("out", os.fdopen(reading, "rb", buffering=0))
        self.num_written = 0
        self.shown: list[str] = []

    def write(self) -> bool:
        """Write and have it read once; whether anything could be written."""
        before = self.num_written
        with contextlib.suppress(BlockingIOError):
            self.num_written += os.write(self.pipe, TEXT[before : before + (1 << 15)])
        with selectors.DefaultSelector() as selector:
            self.output.register(selector)
            for key, _ in selector.select(0) if selector.get_map() else ():
                key.data()
        return self.num_written > before

    def show(self) -> int:
        """Read what has been sent; how much."""
        self.channel.flush()
        sent = [m for m in self.supervisor.collect() if isinstance(m, Output)]
        for message in sent:
            self.shown += message.lines
        return sum(message.num_bytes for message in sent)

    def acknowledge(self) -> None:
        self.output.on_shown(self.show())


@pytest.mark.parametrize("has_log", [True, False])
def test_a_script_waits_only_where_there_is_no_log(tmp_path: Path, has_log: bool) -> None:
    script = Script(tmp_path / "rank0.log" if has_log else Path("/dev/null/rank0.log"))
    while script.num_written < len(TEXT) and script.write():
        pass
    assert (script.num_written == len(TEXT)) is has_log
    assert script.show() < 2 * script_output._MAX_UNSHOWN_BYTES
    while script.num_written < len(TEXT):
        script.output.on_shown(1 << 20)
        script.acknowledge()
        script.write()
    os.close(script.pipe)
    script.output.on_shown(1 << 20)
    script.output.drain(script.acknowledge, is_urgent=False)
    script.acknowledge()
    assert script.shown == TEXT.decode().splitlines()
    script.supervisor.close()
    script.channel.close()
