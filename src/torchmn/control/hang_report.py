"""Reports of what ranks do: which wait in a collective, which did not reach it, and why.

For a job that hangs, and for `torchmn inspect`. Pure functions of the status of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from msgspec import structs

from torchmn.cluster.units import counted, listed, spans
from torchmn.control.messages import (
    CollectiveStatus,
    Inspection,
    Joining,
    Overdue,
    ProcessState,
    StatusReply,
)

DONE = "done"  # the state of a collective that has completed
_NUM_STACK_LINES = 60
_NUM_NAMED = 8
_NUM_SEPARATE = 16
_MOMENT_S = 1.0
_NUM_RECENT = 3
_FRAME = 'File "'
_GOES_ON = (ProcessState.RUNNING, ProcessState.SLEEPING)
_HOLDS_GIL = (
    "it is in C code that holds Python's global interpreter lock (GIL), or is not a Python script"
)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What is known about a rank. ``text`` replaces collectives and stacks that it did not send.

    ``details`` are more lines about it. ``is_halted``: it will not reach another collective without
    outside help. ``has_ended``: it has reached the end of its script. ``awaits_input``: it waits
    for a person at the terminal.
    """

    collectives: tuple[CollectiveStatus, ...] = ()
    stacks: str = ""
    script_stack: str = ""
    text: str = ""
    details: tuple[str, ...] = ()
    is_halted: bool = False
    has_ended: bool = False
    awaits_input: bool = False

    @classmethod
    def of(cls, reply: StatusReply) -> RankStatus:
        """Make the status of a rank from its reply, or from its agent's."""
        if reply.has_ended:
            text = f"has reached the end of its script ({EARLY_END})"
            return cls(text=text, is_halted=True, has_ended=True)
        if reply.process is None:
            return cls(
                collectives=reply.collectives,
                stacks=reply.stacks,
                script_stack=reply.script_stack,
                awaits_input=reply.awaits_input,
            )
        where = f" (in {reply.kernel_function})" if reply.kernel_function else ""
        why = "" if reply.process not in _GOES_ON else f"; {_HOLDS_GIL}"
        return cls(
            text=f"does not answer: its process {reply.process.text}{where}{why}",
            is_halted=reply.process.is_halted,
        )


Statuses = Mapping[int, RankStatus]  # the status of every rank that is known, by rank
# The causes of a script that has ended while other ranks still need it.
EARLY_END = "did it stop early by a value of its own? Or had it fewer batches? See optimizer.join()"


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """The report of a hang in three lengths, and the ranks that did not reach the collective.

    ``summary`` is one sentence for the end of the output, ``short`` is printed before it, and
    ``text`` is the full report with all stacks. ``missing`` are those ranks; empty if all reached
    it, or wait for each other in a cycle.
    """

    summary: str
    short: str
    text: str
    missing: tuple[int, ...]


def report(
    overdue: Overdue, reporter: int, statuses: Statuses, hosts: Mapping[int, str]
) -> HangReport:
    """Report a collective that ``reporter`` found overdue; ``hosts`` has the host of each rank."""
    first = _collective_of(overdue, statuses.get(reporter))
    pending, cause, missing = _cause(first, statuses, hosts)
    cause = cause or (
        f"all of {_ranks(pending.members)} have reached it, so there is a connectivity "
        "problem. Check the network between the hosts (interface, firewall, MTU), or raise "
        "timeout_s= if it is slow"
    )
    head = f"{pending.name} has not completed within {overdue.limit_s:g} s"
    return _hang_report(head, cause, missing, statuses, hosts)


def _cause(
    first: CollectiveStatus, statuses: Statuses, hosts: Mapping[int, str]
) -> tuple[_Pending, str, tuple[int, ...]]:
    """Return the collective that ranks wait for, why it is not over, and the missing ranks.

    The reason is empty if all ranks have reached it.
    """
    pending, is_cycle = _source(_pending(first, statuses, hosts), statuses, hosts)
    missing = pending.missing
    if is_cycle:
        return pending, _disagreement(_waiting(sorted(hosts), statuses)), ()
    if not missing:
        return pending, _disagreement(pending.waiting), ()
    text = _missing_text(
        missing, hosts, lambda rank: _activity(statuses.get(rank), pending.collective)
    )
    return pending, text, missing


def report_of_joining(
    joining: Joining, arrived: Iterable[int], statuses: Statuses, hosts: Mapping[int, str]
) -> HangReport:
    """Report ranks that wait for others in `create_communicator`.

    ``arrived`` are the ranks that have called it. Their status may be missing: MPI joins the ranks
    while it holds the GIL, so that their monitors cannot reply.
    """
    here = set(arrived)
    missing = tuple(
        rank
        for rank in sorted(hosts)
        if rank not in here or ((status := statuses.get(rank)) and status.is_halted)
    )
    head = f"joining all ranks (create_communicator) has not completed within {joining.limit_s:g} s"
    if missing:
        cause = _missing_text(missing, hosts, lambda rank: _activity(statuses.get(rank)))
    else:
        cause = (
            "all ranks have reached it, so there is a connectivity problem. Check the network "
            "between the hosts (MASTER_ADDR, interface, firewall), or raise the limit, "
            "timeout_s=torchmn.Timeout(first_s=...), if it is slow"
        )
    return _hang_report(head, cause, missing, statuses, hosts)


def _missing_text(
    missing: tuple[int, ...], hosts: Mapping[int, str], activity: Callable[[int], str]
) -> str:
    parts = [f"{_name(rank, hosts)} {activity(rank)}" for rank in missing[:_NUM_NAMED]]
    return f"{_ranks(missing)} did not reach it: {'; '.join(parts)}"


def _hang_report(
    head: str, cause: str, missing: tuple[int, ...], statuses: Statuses, hosts: Mapping[int, str]
) -> HangReport:
    def text(*, is_short: bool) -> str:
        lines = [f"Hang: {head}.", f"{cause[0].upper()}{cause[1:]}.", ""]
        return "\n".join([*lines, *_lines_of_all(statuses, hosts, is_short=is_short)]) + "\n"

    return HangReport(
        summary=f"{head}; {cause}",
        short=text(is_short=True),
        text=text(is_short=False),
        missing=missing,
    )


def _lines_of_all(statuses: Statuses, hosts: Mapping[int, str], *, is_short: bool) -> Iterator[str]:
    for ranks in _with_equal_lines(sorted(hosts), statuses):
        title, *rest = _lines_of(ranks[0], statuses.get(ranks[0]), hosts, is_short=is_short)
        yield title
        if ranks[1:]:
            yield f"  (the same on {len(ranks) - 1} more: {', '.join(spans(ranks[1:]))})"
        yield from rest


def report_of_inspection(inspection: Inspection, *, is_full: bool) -> str:
    """Report what the ranks of a running job do, and for whom they wait.

    ``is_full`` shows the stacks of all threads and more collectives, else the script's own frames.
    """
    ranks, num_recent = inspection.ranks, 0 if is_full else _NUM_RECENT  # [-0:] are all
    hosts = {each.rank: each.host for each in ranks}
    statuses = {}
    for each in ranks:
        status = RankStatus() if each.reply is None else RankStatus.of(each.reply)
        details = () if each.reply is None else _details(each.reply, each.pid, num_recent)
        if each.reply is not None or each.text:
            statuses[each.rank] = replace(status, text=each.text or status.text, details=details)
    num_hosts = len(set(filter(None, hosts.values())))
    lines = [
        f"{inspection.log_dir}: {counted(len(ranks), 'rank')} on {counted(num_hosts, 'host')}, "
        f"running for {inspection.seconds:.0f} s.",
        _waits_of(statuses, hosts),
        "",
        *_lines_of_all(statuses, hosts, is_short=not is_full),
    ]
    return "\n".join(lines)


def _waits_of(statuses: Statuses, hosts: Mapping[int, str]) -> str:
    """Describe the collective that has taken longest so far, and which ranks did not reach it."""
    waiting = _waiting(sorted(hosts), statuses).values()
    if not waiting:
        return "No rank is in a collective."
    pending, cause, _ = _cause(max(waiting, key=lambda each: each.age_s), statuses, hosts)
    age_s = max((each.age_s for each in pending.waiting.values()), default=0.0)
    if age_s < _MOMENT_S:  # replies are not of one moment, so it may seem that a rank is missing
        return f"{pending.name} is running."
    cause = cause or f"all of {_ranks(pending.members)} have reached it"
    return f"{pending.name} began {age_s:g} s ago; {cause}."


def _details(reply: StatusReply, pid: int, num_recent: int) -> tuple[str, ...]:
    """Describe memory, the exchange engines and the last collectives of a rank."""
    memory = f"  process {pid}, {reply.rss_nbytes / 1e9:.2f} GB of memory"
    if reply.device_nbytes:
        memory += f", {reply.device_nbytes / 1e9:.2f} GB on its device"
    if reply.awaits_input:
        memory += ", waits for a person at the terminal"
    engines = [
        f"  exchanges{f' of {_ranks(each.ranks)}' if each.ranks else ''}: {int(each.is_running)} "
        f"running, {each.num_queued} queued, {each.num_on_device} on a GPU"
        for each in reply.engines
    ]
    recent = [
        f"    {each.age_s:.1f} s ago: number {each.number} of '{each.group}', {each.what}"
        f"{f', {each.where}' if each.where else ''}, {each.state}, {1e3 * each.seconds:.2f} ms"
        for each in reply.recent[-num_recent:]
    ]
    return memory, *engines, *["  last collectives:"] * bool(recent), *recent


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A collective that has not completed, its ranks, and the state of those that reached it."""

    collective: CollectiveStatus
    members: list[int]
    waiting: dict[int, CollectiveStatus]

    @property
    def name(self) -> str:
        where = f" ({self.collective.where})" if self.collective.where else ""
        return f"{self.collective.what}{where} of group '{self.collective.group}'"

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.waiting)


def _pending(
    collective: CollectiveStatus, statuses: Statuses, hosts: Mapping[int, str]
) -> _Pending:
    members = list(collective.ranks) or sorted(hosts)
    newest = {rank: _newest_in_group(statuses.get(rank), collective) for rank in members}
    waiting = {rank: own for rank, own in newest.items() if own and own.state != DONE}
    return _Pending(collective=collective, members=members, waiting=waiting)


def _source(
    pending: _Pending, statuses: Statuses, hosts: Mapping[int, str]
) -> tuple[_Pending, bool]:
    """Follow from group to group which rank waits for which, up to a rank that does not wait.

    Returns the last collective, and whether ranks wait for each other in a cycle instead.
    """
    seen = [pending.collective]
    while pending.missing:
        elsewhere = _waiting(pending.missing, statuses)
        if len(elsewhere) < len(pending.missing):
            return pending, False  # one of them does not wait
        new = [c for c in elsewhere.values() if not any(_is_same_group(c, old) for old in seen)]
        if not new:
            return pending, True
        seen.append(new[0])
        pending = _pending(new[0], statuses, hosts)
    return pending, False


def _waiting(ranks: Iterable[int], statuses: Statuses) -> dict[int, CollectiveStatus]:
    """Return the collective in which each rank waits; ranks that do not wait are left out."""
    found = {}
    for rank in ranks:
        for own in statuses[rank].collectives if rank in statuses else ():
            if own.state != DONE:
                found[rank] = own
    return found


def _is_same_group(one: CollectiveStatus, other: CollectiveStatus) -> bool:
    return one.group == other.group and one.ranks == other.ranks


def _collective_of(overdue: Overdue, status: RankStatus | None) -> CollectiveStatus:
    for own in status.collectives if status else ():
        if own.group == overdue.group and own.state != DONE:
            return own
    return CollectiveStatus(group=overdue.group, number=overdue.number)


def _newest_in_group(
    status: RankStatus | None, collective: CollectiveStatus
) -> CollectiveStatus | None:
    """Return a rank's newest collective in the group of ``collective``, None if it has none."""
    found = None
    # Several communicators may have the same ranks: one in which the rank waits is preferred.
    for own in status.collectives if status else ():
        if _is_same_group(own, collective):
            if own.state != DONE:
                return own
            found = own
    return found


def _disagreement(waiting: Mapping[int, CollectiveStatus]) -> str:
    """Name the collectives if ranks wait in different ones or in different steps, else empty."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for rank, own in waiting.items():
        group = f"'{own.group}'" + (f" of {_ranks(own.ranks)}" if own.ranks else "")
        kinds.setdefault((own.what, own.where, group), []).append(rank)
    if len(kinds) < 2:
        return ""
    num_groups = len({group for _, _, group in kinds})
    parts = [
        f"{_ranks(ranks)} in {what}"
        + (f" ({where})" if where else "")
        + (f" of group {group}" if num_groups > 1 else "")
        for (what, where, group), ranks in kinds.items()
    ]
    return (
        f"the ranks are in different collectives: {'; '.join(parts)}. All ranks must call the same "
        "ones, in the same order and with the same shapes"
    )


def _activity(status: RankStatus | None, collective: CollectiveStatus | None = None) -> str:
    """Describe what a rank does that did not reach a collective or `create_communicator`."""
    if status is None:
        return "has not answered"
    if status.text:
        return status.text
    place = _innermost_line(status.script_stack or status.stacks)
    text = f"runs at {place}" if place else "runs"
    if collective is None:
        return text
    last = _newest_in_group(status, collective)
    which = f"its last one was number {last.number}, {last.what}" if last else "it had none"
    return f"{text} ({which} of this group)"


def _innermost_line(stacks: str) -> str:
    """Return ``file:line function`` of the main thread, whose stack comes first; may be empty."""
    _, *lines = stacks.splitlines() or [""]
    frames = [
        line for line in takewhile(lambda line: line.startswith(" "), lines) if _FRAME in line
    ]
    if not frames:
        return ""
    file, line, function = (part.strip() for part in frames[-1].split(",", 2))
    return f"{file[len(_FRAME) : -1]}:{line[len('line ') :]} {function}"


def _with_equal_lines(ranks: Sequence[int], statuses: Statuses) -> list[list[int]]:
    """Group ranks with the same status, if there are too many to list one by one."""
    if len(ranks) <= _NUM_SEPARATE:
        return [[rank] for rank in ranks]
    found: dict[object, list[int]] = {}
    for rank in ranks:
        status = statuses.get(rank)
        if status is not None:
            without_age = tuple(structs.replace(each, age_s=0.0) for each in status.collectives)
            status = replace(status, collectives=without_age, details=())
        found.setdefault(status, []).append(rank)
    return list(found.values())


def _lines_of(
    rank: int, status: RankStatus | None, hosts: Mapping[int, str], *, is_short: bool
) -> list[str]:
    name = _name(rank, hosts)
    if status is None:
        return [f"{name}: no answer, neither from the rank nor from its agent."]
    if status.text:
        return [f"{name} {status.text}.", *status.details]
    lines = [f"{name}:"]
    for own in status.collectives:
        where = f", {own.where}" if own.where else ""
        lines.append(
            f"  group '{own.group}': number {own.number}, {own.what}{where}, {own.state}, "
            f"started {own.age_s:g} s ago"
        )
    stacks = (is_short and status.script_stack) or status.stacks
    lines += status.details
    lines += [f"  {line}" for line in stacks.splitlines()[:_NUM_STACK_LINES]]
    return lines


def _ranks(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return listed("rank", [*known[:_NUM_NAMED], *["..."] * (len(known) > _NUM_NAMED)])


def _name(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"
