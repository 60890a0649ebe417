"""Run an elastic job: start the rendezvous and the hosts, show the ranks' output, bring hosts back.

What happens to the job is decided by the rendezvous (`rounds`). This process only reaches hosts,
listens to the ranks of the round that runs, and knows at the end who was to blame.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from torchmn.errors import LaunchError
from torchmn.launch import channel as channels
from torchmn.launch.channel import Channel
from torchmn.launch.elastic.elastic_job import ElasticJob, node_process, store_process
from torchmn.launch.elastic.host import round_secret
from torchmn.launch.elastic.messages import (
    Absent,
    Gathering,
    HostLost,
    Over,
    Round,
    Sentence,
    Stop,
    Watcher,
)
from torchmn.launch.elastic.rendezvous import ROLE
from torchmn.launch.gate import Gate, knock
from torchmn.launch.job import SAVED_STATUS, Command
from torchmn.launch.messages import (
    End,
    Exit,
    Hello,
    Message,
    Note,
    Notice,
    Output,
    Refresh,
    Refused,
    Run,
    Tell,
)
from torchmn.launch.processes import (
    adopt_orphans,
    descendants,
    kill_descendants,
    reap_children,
    send_group,
    shell_code,
    signal_name,
    watch_signals,
)
from torchmn.launch.screen import Screen
from torchmn.launch.verdict import FAILURE_FILE, HANG_FILE, RankRecord, judge
from torchmn.launch.watch import Watch

_STORE_START_S = 20.0
_MARGIN_S = 10.0
"""How much longer than the ranks' grace the hosts have to end by themselves."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass
class _HostProcess:
    """The process here that runs a host's part: ssh to it, or its node process itself."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    pause_s: float = _FIRST_PAUSE_S
    start_at: float = 0.0
    kill_at: float | None = None
    log: Path = field(default_factory=Path)


@dataclass
class _Line:
    """A connection to the agent of a rank."""

    channel: Channel
    record: RankRecord
    hello: Hello
    has_order: bool = False


class ElasticLauncher:
    """Runs an elastic job to its end. It owns the process as the `Supervisor` does."""

    def __init__(self, elastic: ElasticJob, screen: Screen, address: str) -> None:
        self._elastic = elastic
        self._job = elastic.job
        self._screen = screen
        self._address = address
        self._bystanders = descendants(os.getpid())
        self._wakeup = watch_signals(signal.SIGCHLD)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, self._on_notice)
        self._notices: list[int] = []
        self._interrupted_by: int | None = None
        self._has_told_stop = False
        self._listener = channels.listen(address)
        self._gate: Gate | None = None
        self._lines: list[_Line] = []
        self._records: list[RankRecord] = []
        self._watch = Watch(self._records)
        self._has_ended_round = False
        self._round: Round | None = None
        self._hosts = {
            host.name: _HostProcess(host.name, log=self._job.log_dir / f"host-{host.name}.log")
            for host in self._job.hosts
        }
        self._store: subprocess.Popen[bytes] | None = None
        self._store_end: int | None = None
        self._has_lost_store = False
        self._channel: Channel | None = None
        self._end: str | None = None  # why the job ended, empty if it went well
        self._kill_at = float("inf")
        self._said: set[str] = set()

    def run(self, env: Mapping[str, str]) -> int:
        """Run to the common end, and return the job's exit code. Raises LaunchError."""
        adopt_orphans()
        self._env = env
        try:
            self._rendezvous = self._start_store()
            while not self._is_over():
                self._start_hosts()
                self._wait()
                self._act()
        finally:
            kill_descendants(os.getpid(), spare=self._bystanders)
            reap_children()
            for line in self._lines:
                line.channel.close()
            if self._gate is not None:
                self._gate.close()
            self._listener.close()
            if self._channel is not None:
                self._channel.close()
        return self._report()

    # ---- processes ----------------------------------------------------------------------------

    def _start_store(self) -> str:
        """Start the rendezvous and connect to it. Its address."""
        command = store_process(self._elastic, self._env, self._address)
        store = _start(command, self._job.log_dir / "launcher.log", stdout=subprocess.PIPE)
        self._store = store
        if store.stdout is None:  # cannot be: it was asked for
            raise LaunchError("The rendezvous has no standard output.")
        said = _first_line(store.stdout.fileno(), _STORE_START_S)
        found = self._elastic.read_store_answer(said)
        channel = knock(
            found, secret=self._job.secret, role=ROLE, identity=Watcher(pid=os.getpid())
        )
        self._channel = channel
        return found

    def _start_hosts(self) -> None:
        """Start what is due: every host at the beginning, and again those that were lost."""
        now = time.monotonic()
        for host in self._hosts.values():
            if host.process is None and now >= host.start_at and self._end is None:
                command = node_process(
                    self._elastic,
                    self._env,
                    host.name,
                    rendezvous=self._rendezvous,
                    supervisor=channels.address_of(self._listener),
                )
                host.process = _start(command, host.log)
                host.kill_at = None
            if host.process and host.kill_at is not None and now > host.kill_at:
                kill_descendants(host.process.pid, limit_s=1.0)
                send_group(host.process.pid, signal.SIGKILL)

    def _is_over(self) -> bool:
        """Whether the job has ended and nothing of it runs any more."""
        if self._end is None:
            return False
        is_quiet = not any(host.process for host in self._hosts.values())
        return (is_quiet and self._store is None) or time.monotonic() > self._kill_at

    # ---- what happens -------------------------------------------------------------------------

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
            if self._gate is not None:
                selector.register(self._gate, selectors.EVENT_READ, self._on_visitors)
            if self._channel is not None and self._channel.is_open:
                selector.register(self._channel, selectors.EVENT_READ, self._on_rendezvous)
            for line in self._lines:
                if line.channel.is_open:
                    selector.register(
                        line.channel, selectors.EVENT_READ, partial(self._on_line, line)
                    )
            for key, _ in selector.select(0.5):
                key.data()

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        """Noted here, acted upon in the loop; a second Ctrl-C does not wait for anything."""
        if self._interrupted_by == signum == signal.SIGINT:
            kill_descendants(os.getpid(), spare=self._bystanders)
            os._exit(shell_code(-signum))
        self._interrupted_by = self._interrupted_by or signum

    def _on_notice(self, signum: int, _: FrameType | None) -> None:
        """The scheduler says that the end is near: the ranks are told, and go on."""
        self._notices.append(signum)

    def _on_wakeup(self) -> None:
        with suppress(BlockingIOError):
            self._wakeup.recv(64)
        for pid, returncode in reap_children():
            if self._store is not None and pid == self._store.pid:
                self._store, self._store_end = None, returncode
            for host in self._hosts.values():
                if host.process is not None and host.process.pid == pid:
                    self._on_end_of_host(host, returncode)

    def _on_end_of_host(self, host: _HostProcess, returncode: int) -> None:
        """A host cannot be reached, or its part has ended: try again later."""
        if host.process is not None and host.process.stdin is not None:
            host.process.stdin.close()
        host.process = None
        host.start_at = time.monotonic() + host.pause_s
        host.pause_s = min(2 * host.pause_s, _LONGEST_PAUSE_S)
        how = signal_name(returncode) or f"exit code {returncode}"
        words = _last_line(host.log)
        text = f"{how}: {words}" if words else how
        if self._channel is not None and self._end is None:
            self._channel.post(Absent(host=host.name, text=text))
            self._say_once(f"{host.name} is not there ({text}); it is tried again and again.")

    def _on_visitors(self) -> None:
        if self._gate is None:
            return
        for channel, message in self._gate.admit():
            ranks = {line.record.rank for line in self._lines}
            if (
                not isinstance(message, Hello)
                or message.rank not in range(len(self._records))
                or message.rank in ranks
            ):
                channel.close()
                continue
            line = _Line(channel, self._records[message.rank], message)
            line.record.host = message.host
            self._lines.append(line)
        if len(self._lines) == len(self._records):
            self._order_all()

    def _order_all(self) -> None:
        """All ranks of the round are there, so it is known where rank 0 is."""
        job = self._job
        leader = next(line.hello for line in self._lines if line.hello.rank == 0)
        for line in self._lines:
            if not line.has_order:
                line.has_order = True
                line.channel.post(
                    Run(
                        argv=list(job.argv),
                        cwd=str(job.cwd),
                        log_dir=str(self._round_log_dir.absolute()),
                        grace_s=job.grace_s,
                        wants_refreshes=self._screen.shows_bars,
                        script=job.script,
                        env={
                            "MASTER_ADDR": leader.address,
                            "MASTER_PORT": str(leader.port),
                        },
                    )
                )

    def _on_line(self, line: _Line) -> None:
        for message in line.channel.collect():
            self._on_message(line, message)
        if line.channel.is_open:
            line.channel.flush()
        elif not line.record.has_ended:
            line.record.lost_at = time.time()

    def _on_message(self, line: _Line, message: Message) -> None:
        record = line.record
        if isinstance(message, Output):
            record.num_lines += len(message.lines)
            if message.stream == "err":
                record.last_errors.extend(message.lines)
            self._show(partial(self._screen.lines, record.rank, message.stream, message.lines))
        elif isinstance(message, Exit):
            record.exit = message
            line.channel.close()
        elif isinstance(message, Refused):
            self._say_once(f"rank {record.rank} on {record.host}: {message.text}")
        elif isinstance(message, Refresh):
            self._show(partial(self._screen.refresh, record.rank, message.text))
        elif isinstance(message, Note):
            self._say(f"rank {record.rank}: {message.text}")
        else:
            self._watch.hear(record, message, time.monotonic())

    def _on_rendezvous(self) -> None:
        if self._channel is None:
            return
        for message in self._channel.collect():
            if isinstance(message, Round) and not self._has_told_stop:
                self._begin(message)
            elif isinstance(message, Gathering):
                self._hang_up([line for line in self._lines if not line.has_order])
            elif isinstance(message, HostLost):
                self._on_lost_host(message)
            elif isinstance(message, Sentence):
                self._say_once(message.text)
            elif isinstance(message, Over):
                self._finish(message.text)
        if not self._channel.is_open and self._end is None:
            self._has_lost_store = True
            self._finish("lost")

    def _on_lost_host(self, lost: HostLost) -> None:
        """Hang up on its ranks, whose agents then end them, should they still run."""
        self._say(f"{lost.host} was lost: {lost.text}")
        if self._round is not None:
            ranks = _ranks_of(self._round, lost.host)
            self._hang_up([line for line in self._lines if line.record.rank in ranks])
        host = self._hosts[lost.host]
        if host.process is not None:
            if host.process.stdin is not None:
                host.process.stdin.close()
            host.kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S

    def _begin(self, found: Round) -> None:
        """A round begins: its ranks will knock here, with a secret of their own."""
        previous, self._round = self._round, found
        if previous is not None:
            self._say(self._why_again(previous, found))
        self._hang_up(self._lines)
        self._lines = []
        for member in found.members:
            self._hosts[str(member["host"])].pause_s = _FIRST_PAUSE_S
        size = sum(int(member["slots"]) for member in found.members)
        self._records = [RankRecord(rank) for rank in range(size)]
        self._watch, self._has_ended_round = Watch(self._records), False
        if self._gate is not None:
            self._gate.close()
        secret = round_secret(self._job.secret, found.number)
        self._gate = Gate(self._listener.dup(), secret=secret, role=channels.SUPERVISOR)

    def _why_again(self, previous: Round, found: Round) -> str:
        """What ended the last round, and with whom and from where all go on."""
        why = found.why
        if found.num_restarts > previous.num_restarts:
            verdict = judge(
                self._records,
                log_dir=self._round_log_dir_of(previous),
                hang=self._watch.hang,
            )
            why = verdict.sentence.rstrip(".") or why
            why += f"; restart {found.num_restarts} of {self._elastic.limits.max_restarts}"
        names = ", ".join(str(member["host"]) for member in found.members)
        size = sum(int(member["slots"]) for member in found.members)
        memory = f", in memory: step {found.restored[1]}" if found.restored else ""
        return f"{why}: {size} worker(s) on {names} go on from the last checkpoint{memory}."

    # ---- what is done about it ----------------------------------------------------------------

    def _act(self) -> None:
        while self._notices:
            signum = self._notices.pop(0)
            for line in self._lines:
                if line.has_order:
                    line.channel.post(Notice(signum=signum))
        if self._gate is not None:
            self._on_visitors()
        now = time.monotonic()
        if self._watch.must_ask(now):
            for line in self._lines:
                line.channel.post(Tell())
        if self._watch.must_end(now) and not self._has_ended_round:
            self._end_round()
        has_saved = any(
            record.exit is not None and record.exit.returncode == SAVED_STATUS
            for record in self._records
        )
        if (self._interrupted_by or has_saved) and not self._has_told_stop and self._channel:
            self._has_told_stop = True
            is_ctrl_c = self._interrupted_by == signal.SIGINT
            self._channel.post(Stop(signum=signal.SIGINT if is_ctrl_c else signal.SIGTERM))
            self._kill_at = time.monotonic() + self._job.grace_s + 2 * _MARGIN_S
        if self._channel is not None:
            self._channel.flush()

    def _end_round(self) -> None:
        """A rank has failed or hangs, so no rank can go on: their agents let all start again."""
        self._has_ended_round = True
        if self._watch.hang is not None:
            self._show(partial(self._screen.quote, self._watch.hang.text))
            self._keep(self._round_log_dir / HANG_FILE, self._watch.hang.text)
        for line in self._lines:
            line.channel.post(End(signum=signal.SIGTERM))

    def _keep(self, path: Path, text: str) -> None:
        """Write a file beside the logs; a full disk costs the file only."""
        try:
            path.write_text(text)
        except OSError as error:
            self._say(f"cannot write {path}: {error}")

    def _finish(self, text: str) -> None:
        """The job is over: hosts end by themselves, and are killed if they do not in time."""
        if self._end is None:
            self._end = text
            self._kill_at = time.monotonic() + self._job.grace_s + _MARGIN_S
            self._hang_up([line for line in self._lines if not line.has_order])

    def _hang_up(self, lines: list[_Line]) -> None:
        for line in lines:
            line.channel.close()
            if not line.record.has_ended and line.has_order:
                line.record.lost_at, line.record.was_ending = time.time(), True

    @property
    def _round_log_dir(self) -> Path:
        return self._job.log_dir if self._round is None else self._round_log_dir_of(self._round)

    def _round_log_dir_of(self, found: Round) -> Path:
        return self._job.log_dir / f"round{found.number}"

    def _say(self, text: str) -> None:
        self._show(partial(self._screen.say, text))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _show(self, write: partial[None]) -> None:
        """Write to the screen; a reader who left (``| head``) ends the job like a signal."""
        try:
            write()
        except BrokenPipeError:
            self._interrupted_by = self._interrupted_by or signal.SIGPIPE
            self._screen.close()

    def _report(self) -> int:
        """Say how the job ended, and whose fault it was."""
        verdict = judge(
            self._records,
            log_dir=self._round_log_dir,
            interrupted_by=self._interrupted_by,
            hang=self._watch.hang,
        )
        if self._interrupted_by is not None or verdict.exit_code == SAVED_STATUS:
            self._say(verdict.sentence)
            return verdict.exit_code
        if not self._end:
            return 0
        reason = self._loss_of_store() if self._has_lost_store else self._end
        sentences = [f"{reason[:1].upper()}{reason[1:]}."]
        # ranks that only did as they were told are not to blame
        is_blamed = not (verdict.blames_launcher or self._has_lost_store)
        culprit = verdict.culprit if is_blamed else None
        if culprit is not None and culprit.last_errors:
            words = [f"The last words of rank {culprit.rank}:", *culprit.last_words]
            self._show(partial(self._screen.quote, "\n".join(words)))
        if is_blamed and verdict.sentence:
            sentences.append(verdict.sentence)
        words = culprit.last_words if culprit is not None else []
        text = " ".join(sentences)
        self._keep(self._job.log_dir / FAILURE_FILE, "\n".join([*words, text]) + "\n")
        self._say(text)
        return (verdict.exit_code or 1) if is_blamed else 1

    def _loss_of_store(self) -> str:
        how = signal_name(self._store_end or 0)
        ended = f" (its process was ended by {how})" if how else ""
        return (
            f"the rendezvous at {self._rendezvous} was lost{ended}, which knows who takes part, so "
            "all workers were ended. Start the job again: it goes on from its last checkpoint"
        )


def _ranks_of(found: Round, name: str) -> range:
    first = 0
    for member in found.members:
        if member["host"] == name:
            return range(first, first + int(member["slots"]))
        first += int(member["slots"])
    return range(0)


def _start(command: Command, log: Path, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process whose standard input stays open: its end tells it that we are gone."""
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command.argv,
            env=command.env,
            stdin=subprocess.PIPE,
            stdout=file if stdout is None else stdout,
            stderr=file,
            bufsize=0,
            start_new_session=True,
        )
    process.returncode = 0  # the launcher reaps; without it Popen would warn
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(command.stdin)
    return process


def _first_line(descriptor: int, limit_s: float) -> str:
    """The first line that a process writes; what there is of it when the limit is over."""
    said, deadline = b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while b"\n" not in said and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(descriptor, 1 << 12)
            if not chunk:
                break
            said += chunk
    return said.decode(errors="replace").partition("\n")[0]


def _last_line(path: Path) -> str:
    """The last sentence in a log, for a message."""
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("torchmn: ").rstrip(".") if lines else ""
    return ""
