"""Lists of hosts: files, command lines, Slurm's node lists, and the workers of each host."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmn.cluster.hostlists import (
    Host,
    parse_hostfile,
    parse_hosts,
    parse_node_list,
    select_hosts,
)
from torchmn.errors import TopologyError, TorchmnError, UsageError


def texts(hosts: tuple[Host, ...]) -> list[str]:
    return [str(host) for host in hosts]


def test_host_file_of_the_source_documents() -> None:
    text = """
    # all our machines
    name_of_node1 slots=4 # comment
    name_of_node2 slots=2 max-slots=8
    10.0.0.7 slots=1
    node-3.cluster
    """
    assert texts(parse_hostfile(text, source="hosts")) == [
        *("name_of_node1:4", "name_of_node2:2", "10.0.0.7:1", "node-3.cluster:1")
    ]


def test_a_line_per_worker_counts_as_in_schedulers() -> None:
    assert texts(parse_hostfile("b\na\nb\nb\n", source="nodes")) == ["b:3", "a:1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a slots=x", "slots should be a whole number but is 'x'"),
        ("a slots=0", "Host a has 0 slots"),
        ("a cpus=2", "unknown setting 'cpus=2'"),
        ("-a", "'-a' is neither a host name nor an address"),
        ("a;rm", "'a;rm' is neither"),
        ("a slots = 4", "'slots' should|slots should be a whole number"),
    ],
)
def test_an_invalid_line_is_named_with_its_number_and_text(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"hosts, line 2: {line!r}: .*({message})"):
        parse_hostfile(f"good slots=1\n{line}\n", source="hosts")


def test_an_empty_host_file_is_refused() -> None:
    with pytest.raises(UsageError, match="hosts names no host"):
        parse_hostfile("# nothing\n\n", source="hosts")


@pytest.mark.parametrize("text", ["", "a:", ":2", "a:x", "a,,b", "a:2,-b:1"])
def test_invalid_lists_of_the_command_line(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],m1", ["n08", "n09", "n10", "n12", "m1"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-b[1]-ib", ["a-b1-ib"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(parse_node_list(text)) == names


@pytest.mark.parametrize("text", ["", "n[", "n[1-", "n[3-1]", "n[a]", "n]1["])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(TopologyError, match="SLURM_JOB_NODELIST must look like"):
        parse_node_list(text)


@given(st.text(max_size=40))
def test_parsers_refuse_or_answer_whatever_they_read(text: str) -> None:
    for parse in (parse_hosts, parse_node_list, lambda t: parse_hostfile(t, source="x")):
        with contextlib.suppress(TorchmnError):
            assert len(parse(text)) > 0


@pytest.mark.parametrize(
    ("wanted", "slots"),
    [
        ({}, ["a:4", "b:2"]),
        ({"num_ranks": 3}, ["a:3"]),
        ({"num_ranks": 5}, ["a:4", "b:1"]),
        ({"num_nodes": 1}, ["a:4"]),
        ({"per_node": 2}, ["a:2", "b:2"]),
        ({"per_node": 2, "num_ranks": 3}, ["a:2", "b:1"]),
        ({"per_node": 1, "num_nodes": 2, "num_ranks": 2}, ["a:1", "b:1"]),
    ],
)
def test_slots(wanted: dict[str, int], slots: list[str]) -> None:
    assert texts(select_hosts(parse_hosts("a:4,b:2"), **wanted)) == slots


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_ranks": 7}, "7 ranks are more than the 6 slots of a:4, b:2"),
        ({"num_nodes": 3}, "--nodes 3 is more than the 2 hosts"),
        ({"per_node": 3}, "--per-node 3 is more than the slots of b:2"),
        (
            {"per_node": 1, "num_nodes": 2, "num_ranks": 1},
            "-n 1 contradicts --nodes 2 --per-node 1",
        ),
        ({"num_ranks": 0}, "-n must be at least 1"),
        ({"num_nodes": -1}, "--nodes must be at least 1"),
    ],
)
def test_slots_that_do_not_exist(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_hosts(parse_hosts("a:4,b:2"), **wanted)
