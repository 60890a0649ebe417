"""What a hang looks like from all ranks at once: who waits, who has not come, and what he does.

Pure functions of what the ranks, or their agents, have told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from torchmn.control.messages import Joining, Overdue, StatusReply
from torchmn.control.processes import HALTED

_NUM_STACK_LINES = 60
_FRAME = 'File "'


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """``sentence`` for the end of the output, ``text`` with all that is known, and the culprits."""

    sentence: str
    text: str
    missing: tuple[int, ...]


def report(
    overdue: Overdue, asker: int, told: Mapping[int, StatusReply], hosts: Mapping[int, str]
) -> HangReport:
    """The report of a collective that ``asker`` has found overdue.

    ``told`` holds who has answered, ``hosts`` all ranks of the job.
    """
    sight, is_ring = _source(_sight(_group_of(overdue, told.get(asker)), told, hosts), told, hosts)
    group, missing = sight.group, sight.missing
    where = f" ({group['where']})" if group.get("where") else ""
    what = f"{group.get('what', 'a collective')}{where} of group '{group.get('group')}'"
    head = f"{what} has not completed within {overdue.limit_s:g} s"
    if is_ring:
        cause = _disagreement(_waiting(sorted(hosts), told))
        missing = ()
    elif missing:
        cause = f"{_ranks(missing)} did not come to it: " + "; ".join(
            f"{_who(rank, hosts)} {_doing(told.get(rank), group)}" for rank in missing[:8]
        )
    else:
        cause = _disagreement(sight.waiting) or (
            f"all of {_ranks(sight.members)} have come to it, so messages do not get through. Look "
            "at the network between the hosts (interface, firewall, MTU), or raise timeout_s= if "
            "it is slow"
        )
    return _written(head, cause, missing, told, hosts)


def report_of_joining(
    joining: Joining,
    on_the_way: Iterable[int],
    told: Mapping[int, StatusReply],
    hosts: Mapping[int, str],
) -> HangReport:
    """The report of ranks that wait for others at `create_communicator`.

    ``on_the_way`` are those that have come there. They need not answer: MPI joins with Python's
    lock held.
    """
    here = set(on_the_way)
    missing = tuple(
        rank for rank in sorted(hosts) if rank not in here or _is_halted(told.get(rank))
    )
    head = f"joining all ranks (create_communicator) has not completed within {joining.limit_s:g} s"
    if missing:
        cause = f"{_ranks(missing)} did not come to it: " + "; ".join(
            f"{_who(rank, hosts)} {_elsewhere(told.get(rank))}" for rank in missing[:8]
        )
    else:
        cause = (
            "all have come to it, so messages do not get through. Look at the network between the "
            "hosts (MASTER_ADDR, interface, firewall), or raise first_timeout_s= if it is slow"
        )
    return _written(head, cause, missing, told, hosts)


def _written(
    head: str,
    cause: str,
    missing: tuple[int, ...],
    told: Mapping[int, StatusReply],
    hosts: Mapping[int, str],
) -> HangReport:
    lines = [f"A hang: {head}.", f"{cause[0].upper()}{cause[1:]}.", ""]
    for rank in sorted(hosts):
        lines += _lines_of(rank, told.get(rank), hosts)
    return HangReport(sentence=f"{head}; {cause}", text="\n".join(lines) + "\n", missing=missing)


def _is_halted(told: StatusReply | None) -> bool:
    return told is not None and any(words in told.state for words in HALTED)


def _elsewhere(told: StatusReply | None) -> str:
    if told is None:
        return "has not answered"
    if told.state:
        return told.state
    place = _own_line(told.stacks)
    return f"runs at {place}" if place else "runs"


@dataclass(frozen=True, kw_only=True)
class _Sight:
    """One group's newest collective: its ranks, what those do that are in it, and who is not."""

    group: Mapping[str, object]
    members: list[int]
    waiting: dict[int, Mapping[str, object]]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.waiting)


def _sight(
    group: Mapping[str, object], told: Mapping[int, StatusReply], hosts: Mapping[int, str]
) -> _Sight:
    members = [int(rank) for rank in _list(group.get("ranks"))] or sorted(hosts)
    waiting = {
        rank: mine
        for rank in members
        if (mine := _in_group(told.get(rank), group)) is not None and mine["state"] != "done"
    }
    return _Sight(group=group, members=members, waiting=waiting)


def _source(
    sight: _Sight, told: Mapping[int, StatusReply], hosts: Mapping[int, str]
) -> tuple[_Sight, bool]:
    """Follow who waits for whom, from group to group, to where somebody does not wait himself.

    And whether there is no such place: all wait for each other in a ring.
    """
    seen = [sight.group]
    while sight.missing:
        elsewhere = _waiting(sight.missing, told)
        if len(elsewhere) < len(sight.missing):
            return sight, False  # one of them waits for nobody
        ahead = [g for g in elsewhere.values() if not any(_is_same(g, other) for other in seen)]
        if not ahead:
            return sight, True
        seen.append(ahead[0])
        sight = _sight(ahead[0], told, hosts)
    return sight, False


def _waiting(
    ranks: Iterable[int], told: Mapping[int, StatusReply]
) -> dict[int, Mapping[str, object]]:
    """In which collective each of the ranks waits, of those that wait in any."""
    found: dict[int, Mapping[str, object]] = {}
    for rank in ranks:
        answer = told.get(rank)
        for mine in answer.collectives if answer and not answer.state else ():
            if mine.get("state") != "done":
                found[rank] = mine
    return found


def _is_same(group: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return group.get("group") == other.get("group") and group.get("ranks") == other.get("ranks")


def _group_of(overdue: Overdue, told: StatusReply | None) -> Mapping[str, object]:
    for mine in told.collectives if told else ():
        if mine.get("group") == overdue.group and mine.get("state") != "done":
            return mine
    return {"group": overdue.group, "number": overdue.number}


def _in_group(told: StatusReply | None, group: Mapping[str, object]) -> Mapping[str, object] | None:
    """What a rank did last in this group. Communicators with the same ranks may be several."""
    found = None
    for mine in told.collectives if told else ():
        if _is_same(mine, group):
            if mine.get("state") != "done":
                return mine
            found = mine
    return found


def _disagreement(waiting: Mapping[int, Mapping[str, object]]) -> str:
    """A sentence if the ranks are in different collectives, or in the same of other steps."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, mine in waiting.items():
        kind = (mine.get("what"), mine.get("where"), mine.get("group"))
        kinds.setdefault(kind, []).append(rank)
    if len(kinds) < 2:
        return ""
    num_groups = len({group for _, _, group in kinds})
    said = [
        f"{_ranks(ranks)} in {what}"
        + (f" ({where})" if where else "")
        + (f" of group '{group}'" if num_groups > 1 else "")
        for (what, where, group), ranks in kinds.items()
    ]
    return (
        f"the ranks are in different collectives: {'; '.join(said)}. All ranks must call the same "
        "ones, in the same order and with the same shapes"
    )


def _doing(told: StatusReply | None, group: Mapping[str, object]) -> str:
    if told is None:
        return "has not answered"
    if told.state:
        return told.state
    mine = _in_group(told, group)
    last = f"its last one was number {mine['number']}, {mine['what']}" if mine else "it had none"
    place = _own_line(told.stacks)
    return f"runs{f' at {place}' if place else ''} ({last} of this group)"


def _own_line(stacks: str) -> str:
    """Where the main thread is, whose stack comes first: ``file:line in function``."""
    _, *lines = stacks.splitlines() or [""]
    frames = [
        line for line in takewhile(lambda line: line.startswith(" "), lines) if _FRAME in line
    ]
    if not frames:
        return ""
    file, line, function = (part.strip() for part in frames[-1].split(",", 2))
    return f"{file[len(_FRAME) : -1]}:{line[len('line ') :]} {function}"


def _lines_of(rank: int, told: StatusReply | None, hosts: Mapping[int, str]) -> list[str]:
    who = _who(rank, hosts)
    if told is None:
        return [f"{who}: no answer, neither from it nor from its agent."]
    if told.state:
        return [f"{who} {told.state}."]
    lines = [f"{who}:"]
    for mine in told.collectives:
        where = f", {mine['where']}" if mine.get("where") else ""
        lines.append(
            f"  group '{mine.get('group')}': number {mine.get('number')}, {mine.get('what')}"
            f"{where}, {mine.get('state')}, began {mine.get('age_s')} s ago"
        )
    lines += [f"  {line}" for line in told.stacks.splitlines()[:_NUM_STACK_LINES]]
    return lines


def _ranks(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
    return f"rank {some}" if len(known) == 1 else f"ranks {some}"


def _who(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"


def _list(value: object) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else []
