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
from torchmn.control.connection import Channel, address_of, listen
from torchmn.control.messages import Exit, MonitorHello, StatusRequest, Terminate
from torchmn.monitor.failure_detector import FailureDetector
from torchmn.monitor.job_result import FAILURE_FILE, HANG_FILE, JobResult, RankRecord, summarize

ROLE = "hub"
_PERIOD_S = 0.2
_ALL_HERE_S = 120.0
_LAST_WORDS_S = 1.0
"""How long the others may take to say that they have lost a peer, so that the cause comes last."""
_ENDING_S = 20.0


class MonitorServer:
    """Over ``size`` ranks. One thread."""

    def __init__(self, gate: AuthenticatedListener, size: int, log_dir: Path) -> None:
        self._gate = gate
        self._log_dir = log_dir
        self._records = [RankRecord(rank) for rank in range(size)]
        self._watch = FailureDetector(self._records)
        self._channels: dict[int, Channel] = {}
        self._all_here_by = time.monotonic() + _ALL_HERE_S
        self._report_at: float | None = None
        self._leave_at: float | None = None

    def run(self) -> None:
        """Until all ranks have ended."""
        while not self._is_over():
            self._wait()
            self._act(time.monotonic())

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._leave_at is not None and now >= self._leave_at:
            return True
        if len(self._channels) < len(self._records) and now < self._all_here_by:
            return False
        return not any(channel.is_open for channel in self._channels.values())

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._gate, selectors.EVENT_READ)
            for channel in self._channels.values():
                if channel.is_open:
                    selector.register(channel, selectors.EVENT_READ)
            selector.select(_PERIOD_S)
        for channel, identity in self._gate.admit():
            if (
                not isinstance(identity, MonitorHello)
                or identity.rank not in range(len(self._records))
                or identity.rank in self._channels
            ):
                channel.close()
                continue
            self._channels[identity.rank] = channel
            self._records[identity.rank].host = identity.host
        for rank, channel in self._channels.items():
            if channel.is_open:
                self._hear(self._records[rank], channel)

    def _hear(self, record: RankRecord, channel: Channel) -> None:
        channel.flush()
        for message in channel.collect():
            if isinstance(message, Exit):
                record.exit = message
            else:
                self._watch.hear(record, message, time.monotonic())
        if not channel.is_open and not record.has_ended:
            record.lost_at = time.time()
            record.is_silent = channel.is_silent
            record.was_ending = self._leave_at is not None

    def _act(self, now: float) -> None:
        if self._leave_at is None:
            if self._watch.must_query(now):
                for channel in self._channels.values():
                    channel.post(StatusRequest())
            if self._report_at is None and self._watch.must_end(now):
                self._report_at = now + _LAST_WORDS_S
            if self._report_at is not None and (now >= self._report_at or self._all_have_spoken()):
                self._report()
                for channel in self._channels.values():
                    channel.post(Terminate(signum=signal.SIGTERM))
                self._leave_at = now + _ENDING_S
        if all(self._records[rank].has_ended for rank in self._channels) and (
            len(self._channels) == len(self._records) or self._leave_at is not None
        ):
            for channel in self._channels.values():
                channel.close()

    def _all_have_spoken(self) -> bool:
        return all(r.has_ended or r.failed is not None for r in self._records)

    def _report(self) -> None:
        hang = self._watch.hang
        verdict = summarize(self._records, log_dir=self._log_dir, hang=hang, keeps_output=False)
        if hang is not None:
            print(hang.text, file=sys.stderr)
            self._keep(HANG_FILE, hang.text)
        self._say(verdict)

    def _say(self, verdict: JobResult) -> None:
        first_failure = verdict.first_failure
        words = first_failure.error_lines if first_failure is not None else []
        if words and first_failure is not None:
            words = [f"The last words of rank {first_failure.rank}:", *words]
        text = "\n".join([*words, f"torchmn: {verdict.sentence}"])
        print(text, file=sys.stderr, flush=True)
        self._keep(FAILURE_FILE, text + "\n")

    def _keep(self, name: str, text: str) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            (self._log_dir / name).write_text(text)
        except OSError as error:
            print(f"torchmn: cannot write {self._log_dir / name}: {error}", file=sys.stderr)


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
