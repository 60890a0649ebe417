"""Which ranks the report of a hang names."""

from torchmn.control.hang_report import RankStatus, report
from torchmn.control.messages import CollectiveStatus, Overdue, ProcessState, StatusReply

HOSTS = {0: "node0", 1: "node0", 2: "node1"}
OVERDUE = Overdue(group="world", number=5, limit_s=60.0)
STACKS = """MainThread:
  File "/home/me/train.py", line 90, in <module>
    main()
  File "/home/me/train.py", line 17, in main
    time.sleep(100)
worker:
  File "/usr/lib/other.py", line 3, in run
    wait()"""


def status(
    state: str,
    what: str = "all_reduce of float32[10]",
    *,
    number: int = 5,
    group: str = "world",
    ranks: tuple[int, ...] = (0, 1, 2),
    where: str = "bucket 1, step 7",
    call: str = "",
    age_s: float = 60.1,
) -> RankStatus:
    position = {"group": group, "ranks": ranks, "number": number, "where": where, "call": call}
    collective = CollectiveStatus(**position, what=what, state=state, age_s=age_s)
    return RankStatus.of(StatusReply(collectives=(collective,), stacks=STACKS))


STOPPED = RankStatus.of(StatusReply(process=ProcessState.STOPPED))


def test_a_rank_that_computes_is_reported_with_its_line() -> None:
    found = report(
        OVERDUE, 0, {0: status("running"), 1: status("done", number=4), 2: status("running")}, HOSTS
    )
    assert found.missing == (1,)
    assert found.summary.startswith(
        "all_reduce of float32[10] (bucket 1, step 7) of group 'world' has not completed within "
        "60 s; rank 1 did not reach it: rank 1 on node0 runs at /home/me/train.py:17 in main"
    )
    assert "number 4" in found.text
    assert "rank 2 on node1:" in found.text


def test_the_short_report_shows_the_scripts_own_code() -> None:
    internal = '  File "/torchmn/group.py", line 3, in _run\n    wait()'
    own = '  File "/home/me/train.py", line 8, in <module>\n    loss.backward()'
    stacks = f"MainThread:\n{own}\n{internal}"
    reply = StatusReply(stacks=stacks, script_stack=f"MainThread:\n{own}")
    found = report(OVERDUE, 0, {0: RankStatus.of(reply), 1: status("running")}, HOSTS)
    assert "group.py" in found.text
    assert "group.py" not in found.short
    assert found.short.count("loss.backward()") == 1
    assert found.short.count("time.sleep(100)") == 1  # of a rank whose script has no frames
    assert found.short.splitlines()[:2] == found.text.splitlines()[:2]
    assert "rank 0 on node0 runs at /home/me/train.py:8 in <module>" in found.summary


def test_a_process_that_does_not_answer_is_reported_with_its_state() -> None:
    found = report(OVERDUE, 0, {0: status("failed"), 1: status("running"), 2: STOPPED}, HOSTS)
    assert found.missing == (2,)
    assert "rank 2 on node1 does not answer: its process is stopped" in found.summary


def test_a_rank_without_any_reply() -> None:
    found = report(OVERDUE, 0, {0: status("running"), 2: status("running")}, HOSTS)
    assert found.missing == (1,)
    assert "rank 1 on node0 has not answered" in found.summary
    assert "neither from the rank nor from its agent" in found.text


def test_ranks_that_all_send_are_no_connectivity_problem() -> None:
    for name, other in (("send", "receives"), ("recv", "sends")):
        statuses = {rank: status("late", name, where="") for rank in HOSTS}
        found = report(OVERDUE, 0, statuses, HOSTS)
        assert found.missing == ()
        assert f"all of ranks 0, 1, 2 are in {name}, and none of them {other}" in found.summary
        assert "connectivity" not in found.summary


def test_the_call_of_the_script_is_named() -> None:
    call = "recv(rank=1, tag=0) at train.py:7 in main"
    statuses = {0: status("late", "recv", where="", call=call), 1: status("done", number=4)}
    found = report(OVERDUE, 0, statuses, HOSTS)
    assert found.summary.startswith(f"recv ({call}) of group 'world' has not completed within 60 s")
    assert f"recv, {call}, late" in found.text


def test_different_collectives_are_reported() -> None:
    found = report(
        OVERDUE,
        0,
        {
            0: status("running"),
            1: status("running", "broadcast of int64[1]", where=""),
            2: status("failed"),
        },
        HOSTS,
    )
    assert found.missing == ()
    assert "ranks 0, 2 in all_reduce of float32[10] (bucket 1, step 7)" in found.summary
    assert "rank 1 in broadcast of int64[1]" in found.summary
    assert "in the same order and with the same shapes" in found.summary


def test_the_same_collective_of_other_steps_is_a_difference() -> None:
    late = status("running", where="bucket 1, step 6")
    found = report(OVERDUE, 0, {0: status("running"), 1: late, 2: status("running")}, HOSTS)
    assert "rank 1 in all_reduce of float32[10] (bucket 1, step 6)" in found.summary


def test_when_no_rank_is_missing_the_network_is_the_cause() -> None:
    found = report(OVERDUE, 1, {rank: status("running") for rank in HOSTS}, HOSTS)
    assert found.missing == ()
    assert "ranks 0, 1, 2 have reached it" in found.summary
    assert "Check the network" in found.summary


def test_only_members_of_the_group_can_be_missing() -> None:
    node = status("running", group="node", ranks=(0, 1))
    other_node = status("running", group="node", ranks=(2,))
    overdue = Overdue(group="node", number=3, limit_s=10)
    found = report(overdue, 0, {0: node, 1: status("done"), 2: other_node}, HOSTS)
    assert found.missing == (1,)


def of_groups(*statuses: RankStatus) -> RankStatus:
    return RankStatus(collectives=sum((s.collectives for s in statuses), ()), stacks=STACKS)


def test_a_rank_that_waits_in_another_group_is_not_the_cause() -> None:
    """Ranks 0 and 1 share a node, 0 and 2 lead nodes: rank 1 waits for 0, which waits for 2."""
    leaders = {"group": "leaders", "ranks": (0, 2), "what": "all_reduce of float32[9]"}
    node = {"group": "node", "ranks": (0, 1), "what": "broadcast of float32[9]"}
    statuses = {
        0: of_groups(status("done", **node), status("running", **leaders)),
        1: status("running", **node),
        2: of_groups(status("done", group="node", ranks=(2,)), status("done", **leaders)),
    }
    found = report(Overdue(group="node", number=5, limit_s=10), 1, statuses, HOSTS)
    assert found.missing == (2,)
    assert found.summary.startswith(
        "all_reduce of float32[9] (bucket 1, step 7) of group 'leaders'"
    )
    assert "rank 2 on node1 runs at" in found.summary
    statuses[2] = STOPPED
    found = report(Overdue(group="node", number=5, limit_s=10), 1, statuses, HOSTS)
    assert found.missing == (2,)
    assert "rank 2 on node1 does not answer" in found.summary


def test_ranks_that_wait_for_each_other_in_a_cycle() -> None:
    node = {"group": "node", "ranks": (0, 1), "what": "reduce of float32[9]"}
    statuses = {
        0: status("running", **node),
        1: status("running", "barrier"),
        2: status("running", "barrier"),
    }
    found = report(OVERDUE, 2, statuses, HOSTS)
    assert found.missing == ()
    assert "the ranks are in different collectives" in found.summary
    assert "ranks 1, 2 in barrier (bucket 1, step 7) of group 'world'" in found.summary
    assert "rank 0 in reduce of float32[9] (bucket 1, step 7) of group 'node'" in found.summary


def test_ranks_that_do_the_same_are_listed_once_where_there_are_many() -> None:
    hosts = {rank: f"node{rank // 8}" for rank in range(40)}
    ranks = tuple(hosts)
    statuses = {rank: status("running", ranks=ranks, age_s=60.0 + rank) for rank in ranks}
    statuses[20] = status("done", number=4, ranks=ranks)
    del statuses[33]
    found = report(OVERDUE, 0, statuses, hosts)
    assert found.missing == (20, 33)
    lines = found.text.splitlines()
    at = lines.index("rank 0 on node0:")
    assert lines[at + 1] == "  (the same on 37 more: 1-19, 21-32, 34-39)"
    assert "rank 20 on node2:" in lines
    assert "rank 33 on node4: no answer, neither from the rank nor from its agent." in lines
    assert sum("train.py" in line for line in lines[1:]) <= 2 + 2 * 2


def test_communicators_that_wait_for_each_other_in_the_same_collective() -> None:
    """Groups of two communicators may have one name: the ranks tell them apart."""
    whole = CollectiveStatus(group="world", number=3, what="barrier", state="running")
    part = CollectiveStatus(group="world", number=1, ranks=(0, 1), what="barrier", state="running")
    statuses = {0: RankStatus(collectives=(whole,)), 1: RankStatus(collectives=(part,))}
    overdue = Overdue(group="world", number=3, limit_s=60.0)
    found = report(overdue, 0, statuses, {0: "a", 1: "a"})
    assert (
        "rank 0 in barrier of group 'world'; rank 1 in barrier of group 'world' of ranks 0, 1"
        in found.summary
    )
    assert found.missing == ()
