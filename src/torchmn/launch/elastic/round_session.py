"""The ranks of one round of an elastic job."""

from __future__ import annotations

import time

from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.messages.elastic import Round
from torchmn.exit_status import SAVED_STATUS
from torchmn.launch.agent_session import AgentSession
from torchmn.launch.console import RankOutput
from torchmn.launch.job import Job


class RoundSession(AgentSession):
    """The agents of a round, which connect to the round's own ``listener``.

    Their output is in a folder of the round below the job's log folder.
    """

    def __init__(
        self, found: Round, job: Job, listener: AuthenticatedListener, output: RankOutput
    ) -> None:
        log_dir = job.log_dir / f"round{found.number}"
        super().__init__(listener, num_ranks_of(found), job, log_dir, output)
        self.round = found

    @property
    def has_saved(self) -> bool:
        """Whether the ranks saved and exited before the job's time limit."""
        exits = [record.exit for record in self.records if record.exit is not None]
        return any(each.returncode == SAVED_STATUS for each in exits)

    def act(self) -> None:
        """Accept connections, disconnect ended ranks, and end all if one has failed or hangs."""
        self.accept()
        self.disconnect(each for each in self.connections.values() if each.record.exit)
        for text in self.take_problems():
            self._output.say(text)
        if not self.is_ending and self.must_end(time.monotonic()):
            self.end()

    def disconnect_pending(self) -> None:
        """Disconnect agents that still wait for others, which will not connect."""
        if not self.has_started:
            self.disconnect(self.connections.values())

    def drop_host(self, host: str) -> None:
        """Disconnect the ranks of a host; agents that still run there end their scripts."""
        first = 0
        for member in self.round.members:
            ranks = range(first, first + member.slots)
            first = ranks.stop
            if member.host == host:
                self.disconnect(self.connections[r] for r in ranks if r in self.connections)


def num_ranks_of(found: Round) -> int:
    """The number of ranks of a round."""
    return sum(member.slots for member in found.members)
