"""The connections of hosts to the launcher of an elastic job."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    HostHello,
    HostLeaving,
    HostReady,
    JobOrder,
    Message,
    Restart,
    Round,
    Shutdown,
)
from torchmn.run.elastic.rendezvous import ROLE, Rendezvous
from torchmn.run.elastic.rendezvous_state import (
    Decision,
    HostLost,
    Limits,
    RendezvousState,
    UserMessage,
)

ORDER = JobOrder(
    cwd="/", script="", grace_s=5.0, signal_grace_s=30.0, preemption="", env={"A": "1"}
)


class Job:
    """The launcher's side, and hosts that connect to it."""

    def __init__(self) -> None:
        listener = channels.listen_on()
        self._address = channels.address_of(listener)
        state = RendezvousState(["a", "b"], Limits(min_hosts=1, max_hosts=2), now=0.0)
        authenticated = AuthenticatedListener(listener, secret="s", role=ROLE)
        self.rendezvous = Rendezvous(authenticated, state, ORDER)
        self.decisions: list[Decision] = []
        self.hosts: list[Channel] = []
        self.now = 0.0

    def serve(self) -> None:
        self.decisions += self.rendezvous.serve(self.now)

    def join(self, host: str) -> Channel:
        hello = HostHello(host=host, slots=1, versions={})
        with ThreadPoolExecutor(1) as thread:
            connecting = thread.submit(
                connect_authenticated, self._address, secret="s", role=ROLE, identity=hello
            )
            while not connecting.done():
                self.serve()
        self.serve()
        self.hosts.append(connecting.result())
        return self.hosts[-1]

    def enter(self, host: str) -> Channel:
        """Join, and be ready for a round after the order."""
        channel = self.join(host)
        assert self.next_of(channel, JobOrder) == ORDER
        channel.post(HostReady())
        self.serve()
        return channel

    def next_of(self, channel: Channel, kind: type[Message]) -> Message:
        while True:
            self.serve()
            for message in channel.collect():
                if isinstance(message, kind):
                    return message
            assert channel.is_open

    def decided(self, kind: type[Decision]) -> list[Decision]:
        return [each for each in self.decisions if isinstance(each, kind)]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for channel in made.hosts:
        channel.close()
    made.rendezvous.close()


def test_a_round_reaches_all_hosts_and_the_launcher(job: Job) -> None:
    a, b = job.enter("a"), job.enter("b")
    found = job.next_of(a, Round)
    assert found == job.next_of(b, Round)
    assert job.decided(Round) == [found]


def test_a_stranger_is_told_why_and_sent_away(job: Job) -> None:
    stranger = job.join("z")
    leave = job.next_of(stranger, Shutdown)
    assert isinstance(leave, Shutdown)
    assert leave.text == "the job's hosts are a, b"
    (told,) = job.decided(UserMessage)
    assert told == UserMessage(text="z cannot take part: the job's hosts are a, b.")
    while stranger.is_open:
        stranger.collect()


def test_a_host_that_connects_again_was_lost(job: Job) -> None:
    """The others end their ranks, and both are in the next round."""
    a = job.enter("a")
    job.enter("b")
    job.next_of(a, Round)
    again = job.enter("b")
    assert job.decided(HostLost) == [HostLost(host="b", text="b was lost: it connected again")]
    job.next_of(a, Restart)
    a.post(HostReady())
    found = job.next_of(again, Round)
    assert isinstance(found, Round)
    assert [member.host for member in found.members] == ["a", "b"]


def test_a_host_whose_process_does_not_answer_is_lost(job: Job) -> None:
    a = job.enter("a")
    job.enter("b")
    job.next_of(a, Round)
    job.now = 40.0  # both were asked at 0
    job.serve()
    texts = {each.text for each in job.decided(HostLost) if isinstance(each, HostLost)}
    silent = "its process has not answered for 40 s: it is stopped or hangs"
    assert texts == {f"{host} was lost: {silent}" for host in "ab"}


def test_a_connection_that_ends(job: Job) -> None:
    job.join("a")
    job.join("b").close()
    while not job.decided(HostLost):
        job.serve()
    assert job.decided(HostLost) == [
        HostLost(host="b", text="b was lost: its connection was closed")
    ]


def test_a_host_that_cannot_take_part_says_why(job: Job) -> None:
    job.enter("a")
    b = job.join("b")
    b.post(HostLeaving(text="there is no folder /work"))
    b.close()
    while not job.decided(HostLost):
        job.serve()
    (lost,) = job.decided(HostLost)
    assert lost == HostLost(host="b", text="b left: there is no folder /work")
