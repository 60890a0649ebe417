"""``python -m torchmn.run.monitor.server``: monitor all ranks of a job torchmn did not start.

It does what the supervisor does under ``torchmn run``, without being the parent of any rank: it
detects failures and hangs, reports them, and has all ranks ended. Rank 0's script starts it, on its
host (`torchmn.run.install_crash_handler`). Its `Order` is a line on standard input; it
prints its address. It exits when all ranks have ended.
"""

import selectors
import signal
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path

from torchmn.base.errors import LaunchError
from torchmn.base.terminal import say
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.codec import Record, decode
from torchmn.control.connection import address_of, listen_on
from torchmn.control.messages import MonitorHello
from torchmn.control.processes import allow_connections, is_stopped, send
from torchmn.run.monitor.inspections import Inspections
from torchmn.run.monitor.rank_session import (
    RankConnection,
    RankSession,
    stderr_tail,
    write_failure_report,
    write_hang_report,
)

ROLE = "monitor server"  # the role of the listener, see `torchmn.control.authenticated_listener`
_PERIOD_S = 0.2
_CONNECT_LIMIT_S = 120.0
# How long other ranks may take to report that they lost a peer, so that the cause comes last.
_REPORT_DELAY_S = 1.0
_OWN_END_S = 5.0  # how long a rank that failed may take to exit by itself
_END_LIMIT_S = 20.0


class Order(Record, frozen=True, kw_only=True):
    """The address to listen on, the secret and number of the ranks, and the folder for reports."""

    address: str
    secret: str
    num_ranks: int
    log_dir: str


class _Session(RankSession):
    """The connections to the monitors of all ranks."""

    def on_lost(self, connection: RankConnection) -> None:
        """Kill a stopped monitor on this host, and end its script: they would outlive the job."""
        identity = connection.identity
        is_here = connection.record.host == socket.gethostname()
        if is_here and isinstance(identity, MonitorHello) and is_stopped(identity.monitor_pid):
            send(identity.monitor_pid, signal.SIGKILL)
            send(identity.pid, signal.SIGTERM)


class MonitorServer:
    """Monitors ``num_ranks`` ranks until all have ended, in a single thread."""

    def __init__(self, listener: AuthenticatedListener, num_ranks: int, log_dir: Path) -> None:
        self._session = _Session(listener, num_ranks, log_dir)
        self._session.inspections = self._inspections = Inspections(log_dir)
        self._complete_by = self._session.clock.now + _CONNECT_LIMIT_S
        self._report_at: float | None = None
        self._end_at: float | None = None
        self._leave_at: float | None = None

    def run(self) -> None:
        """Serve until all ranks have ended."""
        while not self._is_over():
            with selectors.DefaultSelector() as selector:
                self._session.register(selector)
                for key, _ in selector.select(_PERIOD_S):
                    key.data()
            self._session.accept()
            self._act(self._session.clock.tick())
        self._session.close()
        self._inspections.close()

    def _is_over(self) -> bool:
        now = self._session.clock.now
        if self._leave_at is not None and now >= self._leave_at:
            return True
        if not self._session.is_complete and now < self._complete_by:
            return False
        return not self._session.is_open

    def _act(self, now: float) -> None:
        session = self._session
        if not session.is_ending:
            if session.must_end(now) and self._report_at is None:
                self._report_at = now + _REPORT_DELAY_S
            have_reported = all(r.has_ended or r.failed is not None for r in session.records)
            if (
                self._report_at is not None
                and self._end_at is None
                and (now >= self._report_at or have_reported)
            ):
                self._report()
                self._end_at = now + _OWN_END_S
            # a rank that failed ends by itself, and before others: its launcher names the first
            failed = [r for r in session.records if r.failed_at is not None]
            if self._end_at is not None and (
                now >= self._end_at or all(r.has_ended for r in failed)
            ):
                session.end()
                self._leave_at = now + _END_LIMIT_S
        connected = session.connections.values()
        if all(each.record.has_ended for each in connected) and (
            session.is_complete or session.is_ending
        ):
            session.disconnect(connected)

    def _report(self) -> None:
        """Print and write the reports about the failure or the hang."""
        hang = self._session.detector.hang
        result = self._session.result(keeps_output=False)
        problems = []
        if hang is not None:
            print(hang.short, file=sys.stderr)
            problems.append(write_hang_report(self._session.log_dir, hang.text))
        summary = f"torchmn: {result.summary}"
        # What a rank has shown is not shown again, unless others have shown another error since.
        first, tail = result.first_failure, stderr_tail(result)
        failed = [r.failed for r in self._session.records if r.failed and not r.is_consequence]
        if first is not None and first.failed is not None and not first.is_consequence:
            tail *= len({each.error for each in failed}) > 1
        print("\n".join([*tail, summary]), file=sys.stderr, flush=True)
        problems.append(write_failure_report(self._session.log_dir, result, summary))
        for problem in problems:
            if problem:
                say(problem)


def main() -> int:
    """Read the order, print the address, and monitor all ranks until they have ended.

    If it cannot, it prints an empty line and the reason.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # meant for the ranks, whose ends are awaited
    order = decode(sys.stdin.readline(), Order)
    try:
        allow_connections(order.num_ranks, "the monitor server")
    except LaunchError as error:
        print(f"\n{error}", flush=True)
        return 1
    listener = listen_on(order.address)
    print(address_of(listener), flush=True)
    with suppress(OSError):
        sys.stdout.close()  # the script that started this process reads to the end
    with closing(AuthenticatedListener(listener, secret=order.secret, role=ROLE)) as authenticated:
        MonitorServer(authenticated, order.num_ranks, Path(order.log_dir)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
