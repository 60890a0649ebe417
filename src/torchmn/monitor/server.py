"""``python -m torchmn.monitor.server``: hears all ranks of a foreign launcher's job.

What the supervisor is under ``torchmn run``, without being anybody's parent: it finds out who
failed first or hangs, says so, and has all ranks ended. It stands on the host of rank 0, whose
script starts it, reads its order, a line of JSON, from its standard input and answers with its
address. It ends when all ranks have ended.
"""

from __future__ import annotations

import json
import selectors
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.connection import address_of, listen
from torchmn.monitor.rank_session import (
    RankSession,
    stderr_tail,
    write_failure_report,
    write_hang_report,
)

ROLE = "hub"
_PERIOD_S = 0.2
_CONNECT_LIMIT_S = 120.0
_REPORT_DELAY_S = 1.0
"""How long other ranks may take to report that they lost a peer, so that the cause comes last."""
_END_LIMIT_S = 20.0


class MonitorServer:
    """Follows ``size`` ranks to their end. One thread."""

    def __init__(self, listener: AuthenticatedListener, size: int, log_dir: Path) -> None:
        self._session = RankSession(listener, size, log_dir)
        self._complete_by = time.monotonic() + _CONNECT_LIMIT_S
        self._report_at: float | None = None
        self._leave_at: float | None = None

    def run(self) -> None:
        """Serve until all ranks have ended."""
        while not self._is_over():
            with selectors.DefaultSelector() as selector:
                self._session.register(selector)
                for key, _ in selector.select(_PERIOD_S):
                    key.data()
            self._session.accept()
            self._act(time.monotonic())
        self._session.close()

    def _is_over(self) -> bool:
        now = time.monotonic()
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
            if self._report_at is not None and (now >= self._report_at or have_reported):
                self._report()
                self._leave_at = now + _END_LIMIT_S
        connected = session.connections.values()
        if all(each.record.has_ended for each in connected) and (
            session.is_complete or session.is_ending
        ):
            session.disconnect(connected)

    def _report(self) -> None:
        """Print and write what is known, and have all ranks ended."""
        hang = self._session.detector.hang
        result = self._session.result(keeps_output=False)
        problems = []
        if hang is not None:
            print(hang.text, file=sys.stderr)
            problems.append(write_hang_report(self._session.log_dir, hang.text))
        summary = f"torchmn: {result.sentence}"
        print("\n".join([*stderr_tail(result), summary]), file=sys.stderr, flush=True)
        problems.append(write_failure_report(self._session.log_dir, result, summary))
        for problem in problems:
            if problem:
                print(f"torchmn: {problem}", file=sys.stderr)
        self._session.end()


def main() -> int:
    """Take the order, say where we listen, and hear all ranks to their end."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # meant for the ranks, whose ends we wait for
    order = json.loads(sys.stdin.readline())
    listener = listen(order["address"])
    print(address_of(listener), flush=True)
    with suppress(OSError):
        sys.stdout.close()  # who started us reads to the end
    with closing(AuthenticatedListener(listener, secret=order["secret"], role=ROLE)) as gate:
        MonitorServer(gate, order["size"], Path(order["log_dir"])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
