"""`torchmn run` on a terminal: debuggers, Ctrl-C, prompts, width and colours."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.all.processes.runner import MARK, PYTHON_PATH, Runner
from tests.limits import limit

pytestmark = pytest.mark.processes

PROMPT = "(Pdb) "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of 100 columns, in whose foreground `torchmn run` runs."""

    def __init__(self, runner: Runner, *words: str, **env: str) -> None:
        self._own, of_job = pty.openpty()
        fcntl.ioctl(of_job, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", *words],
            cwd=runner.folder,
            env={
                **{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")},
                "PYTHONPATH": PYTHON_PATH,
                MARK: runner.mark,
                "TERM": "xterm",
                **env,
            },
            stdin=of_job,
            stdout=of_job,
            stderr=of_job,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(of_job)
        self.shown = ""
        self._seen = 0

    def expect(self, text: str, limit_s: float = 10, *, at_any_place: bool = False) -> str:
        """Wait until this text is shown after what was expected before; return what was between.

        ``at_any_place``: before that as well.
        """
        self._seen *= not at_any_place
        deadline = time.monotonic() + limit(limit_s)
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.shown}"
            assert self._read() or text in self.shown[self._seen :], f"ended:\n{self.shown}"
        before, self._seen = self.shown[self._seen : at], at + len(text)
        return before

    def expect_prompt(self) -> None:
        """Wait until the terminal ends with the prompt of rank 0, and nothing else is shown."""
        deadline = time.monotonic() + limit(10)
        while not self.shown[self._seen :].endswith(f"[0] {PROMPT}"):
            assert time.monotonic() < deadline, f"no prompt:\n{self.shown}"
            assert self._read(), f"ended:\n{self.shown}"
        self._seen = len(self.shown)

    def send(self, text: str) -> None:
        os.write(self._own, text.encode())

    def end(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + limit(60)
        while self._read():
            assert time.monotonic() < deadline, self.shown
        return self.process.wait(limit(10))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(limit(10))
        os.close(self._own)

    def _read(self) -> bool:
        if select.select([self._own], [], [], 0.2)[0]:
            try:
                data = os.read(self._own, 1 << 16)
            except OSError:  # all others have closed it
                return False
            self.shown += ESCAPES.sub("", data.decode(errors="replace"))
        return True


@pytest.fixture
def terminal(runner: Runner):
    made: list[Terminal] = []

    def start(*words: str, **env: str) -> Terminal:
        made.append(Terminal(runner, *words, **env))
        return made[-1]

    yield start
    for each in made:
        each.close()
    runner.wait_until_nothing_is_left()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_breakpoint_stops_the_rank_that_has_the_terminal(
    runner: Runner, terminal, num_ranks: int
) -> None:
    script = runner.script("value = rank + 40\nbreakpoint()\nprint('after', value)\n")
    shell = terminal("-n", str(num_ranks), "--backend", "gloo", script)
    for rank in range(1, num_ranks):  # each line of theirs is followed by the prompt once more
        shell.expect(
            f"rank {rank} continues at breakpoint(): the terminal belongs to rank 0",
            at_any_place=True,
        )
        shell.expect(f"[{rank}] after {rank + 40}", at_any_place=True)
    shell.expect("script.py(4)<module>()", at_any_place=True)
    shell.expect_prompt()
    shell.send("value = 7\n")
    shell.expect_prompt()
    shell.send("p value\n")
    shell.expect("[0] 7")
    shell.expect_prompt()
    shell.send("c\n")
    assert shell.end() == 0, shell.shown
    assert "[0] after 7" in shell.shown


def test_a_quiet_rank_with_the_terminal_shows_its_debugger(runner: Runner, terminal) -> None:
    script = runner.script(
        "import torchmn\ncomm = torchmn.create_communicator(quiet=True)\nbreakpoint()\n"
        "print('after', comm.rank)\n"
    )
    shell = terminal("-n", "3", "--backend", "gloo", script, TORCHMN_INPUT_RANK="1")
    shell.expect(f"[1] {PROMPT}")
    shell.send("c\n")
    assert shell.end() == 0, shell.shown
    assert [f"after {rank}" in shell.shown for rank in range(3)] == [True, True, False]


def test_another_rank_gets_the_terminal(runner: Runner, terminal) -> None:
    script = runner.script("import pdb\nif rank == 1: pdb.set_trace()\nprint('after')\n")
    shell = terminal("-n", "2", "--backend", "gloo", script, TORCHMN_INPUT_RANK="1")
    shell.expect(f"[1] {PROMPT}")
    shell.send("c\n")
    assert shell.end() == 0, shell.shown
    shell = terminal("-n", "2", "--backend", "gloo", script)
    assert shell.end() == 1
    assert "the standard input of this rank is no terminal" in shell.shown
    shell = terminal("-n", "2", "--backend", "gloo", script, TORCHMN_INPUT_RANK="2")
    assert shell.end() == 2
    assert "TORCHMN_INPUT_RANK is 2, and ranks are 0 to 1." in shell.shown


def test_ctrl_c_at_a_prompt_is_that_of_pdb(runner: Runner, terminal) -> None:
    script = runner.script("breakpoint()\nprint('after')\n")
    shell = terminal("-n", "2", "--backend", "gloo", script)
    shell.expect("[1] after")
    for _ in range(3):
        shell.expect_prompt()
        shell.send("\x03")
        shell.expect("--KeyboardInterrupt--")
    shell.expect_prompt()
    shell.send("c\n")
    assert shell.end() == 0, shell.shown


def test_ctrl_c_while_no_rank_is_at_a_prompt_ends_the_job(runner: Runner, terminal) -> None:
    script = runner.script("import time\nprint('name?', input())\ntime.sleep(600)\n")
    shell = terminal("-n", "1", "--backend", "gloo", script)
    shell.send("me\n")
    shell.expect("[0] name? me")
    shell.send("\x03")
    assert shell.end() == 130
    assert "interrupted by SIGINT" in shell.shown


def test_quitting_the_debugger_ends_the_job(runner: Runner, terminal) -> None:
    script = runner.script("import time\nif rank == 0: breakpoint()\ntime.sleep(600)\n")
    shell = terminal("-n", "2", "--backend", "gloo", script)
    shell.expect(f"[0] {PROMPT}")
    shell.send("q\n")
    assert shell.end() == 1
    assert "rank 0" in shell.shown.splitlines()[-1], shell.shown
    assert "BdbQuit" in shell.shown


WAITS = """
import time, torchmn
limits = torchmn.Timeout(unreachable_s={t}, busy_s=1.5 * {t}, first_s=3 * {t})
if {before}: breakpoint()
comm = torchmn.create_communicator(timeout_s=limits)
if not {before}: breakpoint()
comm.barrier()
print("together")
"""


@pytest.mark.parametrize("before", [True, False])
def test_no_time_limit_applies_to_a_person(runner: Runner, terminal, before: bool) -> None:
    """Before the communicator exists, and in a collective."""
    script = runner.script(WAITS.format(before=before, t=limit(2)))
    shell = terminal("-n", "3", "--backend", "gloo", script)
    for words in ("rank 1 continues", "rank 2 continues", f"[0] {PROMPT}"):
        shell.expect(words, at_any_place=True)
    time.sleep(limit(7))  # longer than all limits
    assert shell.process.poll() is None
    shell.send("c\n")
    assert shell.end() == 0, shell.shown
    assert shell.shown.count("together") == 3
    assert "waited for" not in shell.shown


def test_other_time_limits_stay(runner: Runner, terminal) -> None:
    script = WAITS.format(before=False, t=limit(1)).replace(
        "breakpoint()", "time.sleep(600 * (rank == 0))"
    )
    shell = terminal("-n", "2", "--backend", "gloo", runner.script(script))
    assert shell.end() == 1
    assert "Hang: " in shell.shown or "has not completed within" in shell.shown


@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_without_a_terminal_is_refused(runner: Runner, call: str) -> None:
    script = runner.script(f"{call}\nprint('after')\n")
    done = runner.run("-n", "2", "--backend", "gloo", script)
    assert done.returncode == 1
    assert "Start the job with `torchmn run` in the foreground of a terminal" in done.stderr


def test_a_debugger_in_a_worker_of_a_loader_is_refused(runner: Runner, terminal) -> None:
    script = runner.script(
        "from torch.utils.data import DataLoader\n"
        "class Data:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i): breakpoint(); return i\n"
        "list(DataLoader(Data(), num_workers=1))\n"
    )
    shell = terminal("-n", "1", "--backend", "gloo", script)
    assert shell.end() == 1
    assert "Use num_workers=0 while you debug." in shell.shown


FACTS = "import os; print('facts', os.environ.get('COLUMNS'), os.environ.get('FORCE_COLOR'))"


def test_width_and_colours_are_those_of_the_terminal(runner: Runner, terminal) -> None:
    shell = terminal("-n", "2", "--backend", "gloo", runner.script(FACTS))
    assert shell.end() == 0
    assert shell.shown.count("facts 96 1") == 2
    shell = terminal("-n", "1", "--backend", "gloo", runner.script(FACTS), NO_COLOR="1")
    assert shell.end() == 0
    assert "facts 96 None" in shell.shown
    shell = terminal("-n", "1", "--backend", "gloo", runner.script(FACTS), FORCE_COLOR="3")
    assert shell.end() == 0
    assert "facts 96 3" in shell.shown


def test_no_width_and_no_colours_without_a_terminal(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    done = runner.run("-n", "1", "--backend", "gloo", runner.script(FACTS))
    assert "facts None None" in done.stdout
