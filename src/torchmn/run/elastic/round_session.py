"""The agents of one round of an elastic job."""

from collections.abc import Callable

from torchmn.base.errors import SAVED_STATUS
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.messages import CheckpointSaved, Message, Round
from torchmn.run.agent_session import AgentSession
from torchmn.run.console import RankOutput
from torchmn.run.job import Job
from torchmn.run.monitor.job_result import RankRecord
from torchmn.run.monitor.rank_session import RankConnection


class RoundSession(AgentSession):
    """The agents of a round, which connect to the round's own ``listener``.

    Their output is in a folder of the round below the job's log folder. ``on_checkpoint`` is called
    when the ranks have finished a checkpoint.
    """

    def __init__(
        self,
        found: Round,
        job: Job,
        listener: AuthenticatedListener,
        output: RankOutput,
        *,
        on_checkpoint: Callable[[CheckpointSaved], None],
    ) -> None:
        log_dir = job.log_dir / f"round{found.number}"
        super().__init__(listener, num_ranks_of(found), job, log_dir, output)
        self.round = found
        self._on_checkpoint = on_checkpoint

    @property
    def has_saved(self) -> bool:
        """Whether the ranks saved and exited before the job's time limit."""
        return self.have_all_ended and any(map(_has_saved, self.records))

    @property
    def have_all_ended(self) -> bool:
        """Whether no rank of the round runs any more."""
        return all(record.has_ended for record in self.records)

    def act(self) -> None:
        """Accept connections, disconnect ended ranks, and end all if one has failed or hangs.

        While ranks leave by themselves none is disconnected, or torchrun's agent would start a
        round.
        """
        self.accept()
        is_leaving = self.leave_by is not None or any(map(_has_saved, self.records))
        if self.have_all_ended or not is_leaving:
            self.disconnect(each for each in self.connections.values() if each.record.exit)
        for text in self.take_problems():
            self._output.say(text)
        if not self.is_ending and self.must_end(self.clock.tick()):
            self.end()

    def on_message(self, connection: RankConnection, message: Message) -> None:
        """Pass finished checkpoints on; everything else as in `AgentSession`."""
        if isinstance(message, CheckpointSaved):
            self._on_checkpoint(message)
        else:
            super().on_message(connection, message)

    def on_launcher_stopped(self, text: str) -> None:
        """The process of a host: the rendezvous notices that it does not answer."""

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


def _has_saved(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.returncode == SAVED_STATUS


def num_ranks_of(found: Round) -> int:
    """The number of ranks of a round."""
    return sum(member.slots for member in found.members)
