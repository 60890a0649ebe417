import signal
from typing import Any

import pytest

from torchmn.control.messages import HostHello, Message, Restart, Round, Shutdown
from torchmn.errors import UsageError
from torchmn.run.elastic.rendezvous_state import (
    Decision,
    HostLost,
    JobEnded,
    Limits,
    RendezvousState,
    UserMessage,
)

VERSIONS = {"torch": "2.13"}


class Play:
    """RendezvousState, a clock, and what was posted to whom."""

    def __init__(self, *hosts: str, is_open: bool = False, **limits: Any) -> None:
        plain = {"min_hosts": 1, "max_hosts": len(hosts), "max_restarts": 3, "join_timeout_s": 60.0}
        self.now = 0.0
        own = HostHello(host=hosts[0], slots=2, versions=VERSIONS, node_rank=0, command="t.py -e 3")
        self.rounds = RendezvousState(
            hosts, Limits(**{**plain, **limits}), now=0.0, own=own if is_open else None
        )

    def come(self, *hosts: str, versions: dict[str, str] = VERSIONS, **more: object) -> str:
        """They connect and are ready; the problem of the last one."""
        problem = ""
        for host in hosts:
            member = HostHello(host=host, slots=2, versions=versions, **more)  # type: ignore[arg-type]
            problem = self.rounds.on_host_joined(member)
            if not problem:
                self.arrive(host)
        return problem

    def join(self, *hosts: str, node_rank: int | None = None, command: str = "t.py -e 3") -> str:
        """As `come`, of hosts that the launcher has not started."""
        return self.come(*hosts, node_rank=node_rank, command=command)

    def arrive(self, *hosts: str) -> None:
        for host in hosts:
            self.rounds.on_host_ready(host, self.now)

    def wait(self, until_s: float) -> list[str]:
        """Nothing happens up to then; the hosts that are given up."""
        self.now = until_s
        return self.rounds.tick(until_s)

    def lose(self, host: str) -> None:
        self.rounds.on_host_lost(host, "gone", self.now)

    def forget(self) -> None:
        """What was posted and decided up to now."""
        self.rounds.drain_messages()
        self.rounds.drain_decisions()

    def posted(self, host: str, kind: type[Message]) -> list[Message]:
        self.rounds.drain_decisions()
        messages = self.rounds.drain_messages()
        return [each for to, each in messages if to == host and type(each) is kind]

    def decided(self, kind: type[Decision]) -> Decision | None:
        self.rounds.drain_messages()
        found = [each for each in self.rounds.drain_decisions() if type(each) is kind]
        return found[-1] if found else None

    def round(self) -> Round | None:
        found = self.decided(Round)
        assert found is None or isinstance(found, Round)
        return found

    def over(self) -> str | None:
        found = self.decided(JobEnded)
        return found.text if isinstance(found, JobEnded) else None


def names(found: Round | None) -> list[object]:
    assert found is not None
    return [member.host for member in found.members]


def began(*hosts: str, **limits: Any) -> Play:
    """All hosts have come, and a round runs."""
    play = Play(*hosts, **limits)
    play.come(*hosts)
    assert names(play.round()) == [*hosts]
    return play


def test_starts_when_all_hosts_are_there_in_the_order_of_the_list() -> None:
    play = Play("a", "b", "c")
    play.come("c", "a")
    assert play.round() is None
    play.come("b")
    assert names(play.round()) == ["a", "b", "c"]


def test_does_not_wait_for_a_host_that_cannot_be_reached() -> None:
    play = Play("a", "b")
    play.come("a")
    play.rounds.on_host_unreachable("b", play.now)
    assert names(play.round()) == ["a"]


def test_starts_with_fewer_when_the_time_to_join_is_over() -> None:
    play = Play("a", "b", "c", min_hosts=2)
    play.come("a", "b")
    play.wait(61.0)
    assert names(play.round()) == ["a", "b"]


def test_too_few_hosts_end_the_job_with_their_names_and_the_limit() -> None:
    play = Play("a", "b", "c", min_hosts=2)
    play.come("a")
    play.wait(61.0)
    text = str(play.over())
    assert "1 host joined (a) within" in text
    assert "--elastic MIN:MAX:SECONDS" in text


def test_a_failed_worker_restarts_all_and_counts() -> None:
    play = began("a", "b", max_restarts=1)
    play.arrive("a")  # its agent comes back by itself: a worker has failed
    assert play.posted("b", Restart)
    play.arrive("b")
    found = play.round()
    assert names(found) == ["a", "b"]
    assert found is not None
    assert (found.number, found.num_restarts) == (2, 1)
    play.arrive("b", "a")
    assert play.over() == "a rank on b failed, and all 1 restarts are used up"


def test_a_lost_host_does_not_count_though_workers_fail_of_it() -> None:
    play = began("a", "b", max_restarts=0)
    play.arrive("a")  # its workers fail first, since b's do not answer
    assert play.over() is None
    play.lose("b")  # seconds later
    found = play.round()
    assert names(found) == ["a"]
    assert found is not None
    assert found.num_restarts == 0


def test_waits_until_all_workers_of_the_old_round_have_stopped() -> None:
    play = began("a", "b", "c")
    play.lose("c")
    play.forget()
    play.arrive("a")
    assert play.round() is None
    play.arrive("b")
    assert names(play.round()) == ["a", "b"]


def test_a_host_whose_workers_do_not_stop_is_given_up() -> None:
    play = began("a", "b")
    play.arrive("a")
    play.forget()
    assert play.wait(36.0) == ["b"]
    assert names(play.round()) == ["a"]


def test_a_host_that_comes_back_waits_for_an_announcement() -> None:
    play = began("a", "b")
    play.lose("b")
    play.arrive("a")
    assert names(play.round()) == ["a"]
    play.come("b")
    assert [type(each) for each in play.rounds.drain_decisions()] == [UserMessage]
    assert not play.rounds.drain_messages()  # no host is disturbed
    play.rounds.on_checkpoint_saved(40, play.now)
    assert play.posted("a", Restart)
    play.arrive("a")
    assert names(play.round()) == ["a", "b"]


def test_a_waiting_host_replaces_one_that_was_lost() -> None:
    play = Play("a", "b", "c", max_hosts=2)
    play.come("c", "a")
    assert names(play.round()) == ["a", "c"]
    play.come("b")
    play.rounds.on_checkpoint_saved(10, play.now)
    assert play.round() is None  # there is no room
    play.lose("a")
    play.arrive("c")
    assert names(play.round()) == ["b", "c"]


def test_ends_when_all_have_finished() -> None:
    play = began("a", "b")
    play.rounds.on_host_finished("a")
    assert play.over() is None
    play.rounds.on_host_finished("b")
    assert play.over() == ""
    assert play.rounds.is_over


def test_who_has_finished_works_again_if_another_fails() -> None:
    play = began("a", "b")
    play.rounds.on_host_finished("a")
    play.arrive("b")
    assert play.posted("a", Restart)
    play.arrive("a")
    assert names(play.round()) == ["a", "b"]


def test_who_finishes_when_it_is_to_stop_is_waited_for() -> None:
    """Its message has met the request to stop on the way."""
    play = began("a", "b", "c")
    play.arrive("b")
    play.rounds.on_host_finished("a")
    play.arrive("c")
    assert play.round() is None
    play.arrive("a")
    assert names(play.round()) == ["a", "b", "c"]


def test_a_host_lost_after_it_has_finished_is_not_missed() -> None:
    play = began("a", "b")
    play.rounds.on_host_finished("a")
    play.lose("a")
    play.rounds.on_host_finished("b")
    assert play.over() == ""


def test_unauthenticated_clients_and_other_versions_are_sent_away() -> None:
    play = Play("a", "b")
    assert play.come("z") == "the job's hosts are a, b"
    play.come("a")
    problem = play.come("b", versions={"torch": "2.12"})
    assert "torch is 2.13 on a and 2.12 on b" in problem


def test_a_signal_reaches_all_hosts() -> None:
    play = began("a", "b")
    play.rounds.stop(signal.SIGINT)
    posts = play.rounds.drain_messages()
    assert ("a", Shutdown(signum=signal.SIGINT, text="")) in posts
    assert ("b", Shutdown(signum=signal.SIGINT, text="")) in posts
    play.lose("a")
    assert play.decided(HostLost) is None  # that is what was asked for


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2)])
def test_limits_are_checked(least: int, most: int) -> None:
    with pytest.raises(UsageError, match="MIN:MAX"):
        Limits(min_hosts=least, max_hosts=most)


def test_other_limits_are_checked() -> None:
    with pytest.raises(UsageError, match="--max-restarts"):
        Limits(min_hosts=1, max_hosts=1, max_restarts=-1)
    with pytest.raises(UsageError, match="must be a positive number, got 0"):
        Limits(min_hosts=1, max_hosts=1, join_timeout_s=0)


def test_hosts_that_know_the_secret_join_an_open_job() -> None:
    """At first those that come within seconds of each other; later ones after a checkpoint."""
    play = Play("a", max_hosts=3, is_open=True)
    play.come("a")
    play.join("x")
    assert play.round() is None
    play.now = 4.0
    play.join("b")
    assert names(play.round()) == ["a", "x", "b"]
    play.join("c")
    play.rounds.on_checkpoint_saved(5, play.now)
    assert play.round() is None  # there is no room
    play.lose("x")
    play.arrive("a", "b")
    assert names(play.round()) == ["a", "b", "c"]


def test_an_open_job_begins_some_seconds_after_the_last_host() -> None:
    play = Play("a", max_hosts=3, is_open=True)
    play.come("a")
    play.join("b")
    play.wait(4.9)
    assert play.round() is None
    play.wait(5.1)
    assert names(play.round()) == ["a", "b"]


def test_node_ranks_order_hosts_and_are_unique() -> None:
    play = Play("a", min_hosts=3, max_hosts=3, is_open=True)
    assert play.join("z", node_rank=1) == ""
    assert play.join("y", node_rank=1) == "z has --node-rank 1: give each host another one"
    play.join("y", node_rank=2)
    play.come("a", node_rank=0)
    assert names(play.round()) == ["a", "z", "y"]


def test_a_second_host_of_the_same_name_is_refused() -> None:
    play = Play("a", max_hosts=3, is_open=True)
    play.join("b")
    for name in ("b", "a"):  # also that of the launcher's own host, which may come later
        assert f"a host named {name} takes part. Give each host a name" in play.join(name)


def test_a_host_with_another_command_is_refused() -> None:
    play = Play("a", max_hosts=3, is_open=True)
    assert "a runs 't.py -e 3', and b was given 't.py -e 2'" in play.join("b", command="t.py -e 2")
    assert play.join("b") == ""


def test_a_host_that_leaves_is_in_no_further_round() -> None:
    """The ranks of all have saved and end by themselves, which is no failure; it may come again."""
    play = Play("a", max_hosts=2, is_open=True, max_restarts=0)
    play.come("a")
    play.join("b")
    assert names(play.round()) == ["a", "b"]
    play.rounds.on_host_leaving("b", "AWS takes it")
    assert play.rounds.will_continue
    assert play.decided(UserMessage) == UserMessage(text="b leaves: AWS takes it.")
    play.arrive("a", "b")
    messages, decisions = play.rounds.drain_messages(), play.rounds.drain_decisions()
    assert ("b", Shutdown(signum=signal.SIGTERM, text="")) in messages
    (found,) = [each for each in decisions if isinstance(each, Round)]
    assert names(found) == ["a"]
    assert (found.num_restarts, found.reason) == (0, "b leaves: AWS takes it")
    assert not play.rounds.will_continue
    play.lose("b")
    assert play.decided(HostLost) == HostLost(host="b", text="b left: AWS takes it")
    play.join("b")
    play.rounds.on_checkpoint_saved(10, play.now)
    play.arrive("a")
    assert names(play.round()) == ["a", "b"]


def test_a_host_that_leaves_before_its_ranks_have_saved() -> None:
    play = Play("a", max_hosts=2, is_open=True, max_restarts=0)
    play.come("a")
    play.join("b")
    play.rounds.on_host_leaving("b", "it received SIGTERM")
    play.lose("b")
    assert play.posted("a", Restart)
    play.arrive("a")
    assert names(play.round()) == ["a"]


def test_a_host_that_cannot_run_the_job_disturbs_nobody() -> None:
    play = Play("a", max_hosts=2, is_open=True)
    play.come("a")
    play.wait(6.0)
    assert names(play.round()) == ["a"]
    member = HostHello(host="b", slots=2, versions=VERSIONS, command="t.py -e 3")
    assert play.rounds.on_host_joined(member) == ""
    play.rounds.on_checkpoint_saved(3, play.now)  # b has not said yet that it is ready
    play.rounds.on_host_leaving("b", "there is no folder /x")
    play.lose("b")
    assert not play.rounds.drain_messages()
    assert not play.rounds.will_continue


def fixed(**more: int) -> Play:
    """Two hosts that were started one by one; a round runs."""
    play = Play("a", min_hosts=2, max_hosts=2, is_open=True, is_fixed=True, **more)
    play.come("a", node_rank=0)
    assert play.join("b", node_rank=1) == ""
    assert names(play.round()) == ["a", "b"]
    return play


def test_a_fixed_number_of_hosts_starts_at_once_and_ends_with_any_of_them() -> None:
    play = fixed()
    assert play.join("c") == "the job has its 2 hosts: a, b"
    play.lose("b")
    assert play.over() == "b was lost: gone"


def test_the_host_of_the_launcher_has_its_place_in_a_fixed_number() -> None:
    play = Play("a", min_hosts=2, max_hosts=2, is_open=True, is_fixed=True)
    assert play.join("b") == ""
    assert play.join("c") == "the job has its 2 hosts: a, b"
    play.come("a", node_rank=0)
    assert names(play.round()) == ["a", "b"]


def test_a_notice_of_a_host_that_is_lost_is_too_late() -> None:
    play = fixed()
    play.lose("b")
    assert play.over() == "b was lost: gone"
    play.rounds.on_host_leaving("b", "AWS will terminate it")
    assert not play.rounds.drain_decisions()


def test_a_host_that_leaves_a_fixed_number_ends_the_job() -> None:
    play = fixed()
    play.rounds.on_host_leaving("b", "it received SIGINT")
    assert not play.rounds.will_continue
    play.arrive("b")
    assert play.over() == "b leaves: it received SIGINT"


def test_restarts_of_a_fixed_number_of_hosts() -> None:
    play = fixed(max_restarts=1)
    play.arrive("a", "b")
    assert names(play.round()) == ["a", "b"]
    play.arrive("b", "a")
    assert play.over() == "a rank failed, and all 1 restarts are used up"
    play = fixed(max_restarts=0)
    play.arrive("b", "a")
    assert play.over() == "a rank failed"


def test_missing_hosts_of_a_fixed_number_are_named() -> None:
    play = Play("a", min_hosts=3, max_hosts=3, is_open=True, is_fixed=True)
    play.come("a", node_rank=0)
    play.join("c", node_rank=2)
    assert "a has --node-rank 0" in play.join("d", node_rank=0)
    assert "less than --nnodes 3" in play.join("d", node_rank=3)
    play.forget()
    play.wait(61.0)
    assert "2 of 3 hosts joined (a, c) within 60 s; --node-rank 1 did not." in str(play.over())
