"""Reports of what ranks do: which wait in a collective, which did not reach it, and why.

For a job that hangs, and for `torchmn inspect`. Pure functions of the status of every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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

    what: str
    limit_s: float
    cause: str
    short: str
    text: str
    missing: tuple[int, ...]

    @property
    def summary(self) -> str:
        """What is not over within its time limit, and the cause."""
        return f"{_overdue(self.what, self.limit_s)}; {self.cause}"


def _overdue(what: str, limit_s: float) -> str:
    return f"{what} has not completed within {limit_s:g} s"


def report(
    overdue: Overdue, reporter: int, statuses: Statuses, hosts: Mapping[int, str]
) -> HangReport:
    """Report a collective that ``reporter`` found overdue; ``hosts`` has the host of each rank."""
    job = _Job(statuses, hosts)
    pending, cause, missing = job.cause(job.collective_of(overdue, reporter))
    cause = cause or (
        f"all of {_ranks(pending.members)} have reached it, so there is a connectivity "
        "problem. Check the network between the hosts (interface, firewall, MTU), or raise "
        "timeout_s= if it is slow"
    )
    return job.report(pending.name, overdue.limit_s, cause, missing)


def report_of_joining(
    joining: Joining, arrived: Iterable[int], statuses: Statuses, hosts: Mapping[int, str]
) -> HangReport:
    """Report ranks that wait for others in `create_communicator`.

    ``arrived`` are the ranks that have called it. Their status may be missing: MPI joins the ranks
    while it holds the GIL, so that their monitors cannot reply.
    """
    job, here = _Job(statuses, hosts), set(arrived)
    missing = tuple(
        rank
        for rank in sorted(hosts)
        if rank not in here or ((status := statuses.get(rank)) and status.is_halted)
    )
    what = "joining all ranks (create_communicator)"
    cause = (
        "all ranks have reached it, so there is a connectivity problem. Check the network "
        "between the hosts (MASTER_ADDR, interface, firewall), or raise the limit, "
        "timeout_s=torchmn.Timeout(first_s=...), if it is slow"
    )
    cause = job.missing_text(missing) if missing else cause
    return job.report(what, joining.limit_s, cause, missing)


def report_of_inspection(inspection: Inspection, *, is_full: bool) -> str:
    """Report what the ranks of a running job do, and for whom they wait.

    ``is_full`` shows the stacks of all threads and more collectives, else the script's own frames.
    """
    ranks, num_recent = inspection.ranks, 0 if is_full else _NUM_RECENT  # [-0:] are all
    statuses = {}
    for each in ranks:
        status = RankStatus() if each.reply is None else RankStatus.of(each.reply)
        details = () if each.reply is None else _details(each.reply, each.pid, num_recent)
        if each.reply is not None or each.text:
            statuses[each.rank] = replace(status, text=each.text or status.text, details=details)
    job = _Job(statuses, {each.rank: each.host for each in ranks})
    num_hosts = len(set(filter(None, job.hosts.values())))
    lines = [
        f"{inspection.log_dir}: {counted(len(ranks), 'rank')} on {counted(num_hosts, 'host')}, "
        f"running for {inspection.seconds:.0f} s.",
        job.waits(),
        "",
        *job.lines(is_short=not is_full),
    ]
    return "\n".join(lines)


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
        f"    {each.age_s:.1f} s ago: number {each.number} of '{each.group}', "
        f"{each.described}, {each.state}, {1e3 * each.seconds:.2f} ms"
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
        where = ", ".join(filter(None, (self.collective.where, self.collective.call)))
        return f"{self.collective.what}{where and f' ({where})'} of group '{self.collective.group}'"

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.waiting)


@dataclass(frozen=True)
class _Job:
    """What is known about all ranks, and their hosts."""

    statuses: Statuses
    hosts: Mapping[int, str]

    def report(self, what: str, limit_s: float, cause: str, missing: tuple[int, ...]) -> HangReport:
        """Return the report of a hang."""
        begin = f"Hang: {_overdue(what, limit_s)}.\n{cause[0].upper()}{cause[1:]}.\n\n"
        short, text = (
            begin + "\n".join(self.lines(is_short=is_short)) + "\n" for is_short in (True, False)
        )
        return HangReport(
            what=what, limit_s=limit_s, cause=cause, short=short, text=text, missing=missing
        )

    def cause(self, first: CollectiveStatus) -> tuple[_Pending, str, tuple[int, ...]]:
        """Return the collective that ranks wait for, why it is not over, and the missing ranks.

        The reason is empty if all ranks have reached it.
        """
        pending, is_cycle = self._source(self._pending(first))
        if is_cycle:
            return pending, _disagreement(self._waiting(self.hosts)), ()
        if not pending.missing:
            return pending, _disagreement(pending.waiting), ()
        text = self.missing_text(pending.missing, pending.collective)
        return pending, text, pending.missing

    def waits(self) -> str:
        """Describe the collective that has taken longest so far, and who did not reach it."""
        waiting = self._waiting(self.hosts).values()
        if not waiting:
            return "No rank is in a collective."
        pending, cause, _ = self.cause(max(waiting, key=lambda each: each.age_s))
        age_s = max((each.age_s for each in pending.waiting.values()), default=0.0)
        # Replies are not of one moment, so it may seem that a rank is missing.
        if age_s < _MOMENT_S:
            return f"{pending.name} is running."
        cause = cause or f"all of {_ranks(pending.members)} have reached it"
        return f"{pending.name} began {age_s:g} s ago; {cause}."

    def missing_text(
        self, missing: tuple[int, ...], collective: CollectiveStatus | None = None
    ) -> str:
        """Describe which ranks did not reach a collective, or `create_communicator`, and why."""
        parts = [f"{self._name(r)} {self._activity(r, collective)}" for r in missing[:_NUM_NAMED]]
        return f"{_ranks(missing)} did not reach it: {'; '.join(parts)}"

    def lines(self, *, is_short: bool) -> Iterator[str]:
        """Yield the lines about all ranks."""
        for ranks in self._with_equal_lines():
            title, *rest = self._lines_of(ranks[0], is_short=is_short)
            yield title
            if ranks[1:]:
                yield f"  (the same on {len(ranks) - 1} more: {', '.join(spans(ranks[1:]))})"
            yield from rest

    def collective_of(self, overdue: Overdue, rank: int) -> CollectiveStatus:
        """Return the collective that a rank found overdue, as far as it is known."""
        for own in self._collectives(rank):
            if own.group == overdue.group and own.state != DONE:
                return own
        return CollectiveStatus(group=overdue.group, number=overdue.number)

    def _collectives(self, rank: int) -> tuple[CollectiveStatus, ...]:
        return self.statuses[rank].collectives if rank in self.statuses else ()

    def _pending(self, collective: CollectiveStatus) -> _Pending:
        members = list(collective.ranks) or sorted(self.hosts)
        newest = {rank: self._newest_in_group(rank, collective) for rank in members}
        waiting = {rank: own for rank, own in newest.items() if own and own.state != DONE}
        return _Pending(collective=collective, members=members, waiting=waiting)

    def _source(self, pending: _Pending) -> tuple[_Pending, bool]:
        """Follow from group to group which rank waits for which, up to one that does not wait.

        Returns the last collective, and whether ranks wait for each other in a cycle instead.
        """
        seen = [pending.collective]
        while pending.missing:
            elsewhere = self._waiting(pending.missing)
            if len(elsewhere) < len(pending.missing):
                return pending, False  # one of them does not wait
            # Groups that wait for each other would be followed round and round.
            new = [c for c in elsewhere.values() if not any(_is_same_group(c, old) for old in seen)]
            if not new:
                return pending, True
            seen.append(new[0])
            pending = self._pending(new[0])
        return pending, False

    def _waiting(self, ranks: Iterable[int]) -> dict[int, CollectiveStatus]:
        """Return the collective in which each rank waits; those that do not wait are left out."""
        found = {}
        for rank in sorted(ranks):
            for own in self._collectives(rank):
                if own.state != DONE:
                    found[rank] = own
        return found

    def _newest_in_group(self, rank: int, collective: CollectiveStatus) -> CollectiveStatus | None:
        """Return a rank's newest collective in the group of ``collective``, None if it has none."""
        own = [each for each in self._collectives(rank) if _is_same_group(each, collective)]
        # Several communicators may have the same ranks: one in which the rank waits is preferred.
        return next((each for each in own if each.state != DONE), own[-1] if own else None)

    def _activity(self, rank: int, collective: CollectiveStatus | None) -> str:
        """Describe what a rank does that did not reach a collective or `create_communicator`."""
        status = self.statuses.get(rank)
        if status is None:
            return "has not answered"
        if status.text:
            return status.text
        place = _innermost_line(status.script_stack or status.stacks)
        text = f"runs at {place}" if place else "runs"
        if collective is None:
            return text
        last = self._newest_in_group(rank, collective)
        which = f"its last one was number {last.number}, {last.what}" if last else "it had none"
        return f"{text} ({which} of this group)"

    def _with_equal_lines(self) -> list[list[int]]:
        """Group ranks with the same status, if there are too many to list one by one."""
        ranks = sorted(self.hosts)
        if len(ranks) <= _NUM_SEPARATE:
            return [[rank] for rank in ranks]
        found: dict[object, list[int]] = {}
        for rank in ranks:
            status = self.statuses.get(rank)
            if status is not None:
                # Replies are of different moments, and memory differs on ranks that do the same.
                without_age = tuple(structs.replace(each, age_s=0.0) for each in status.collectives)
                status = replace(status, collectives=without_age, details=())
            found.setdefault(status, []).append(rank)
        return list(found.values())

    def _lines_of(self, rank: int, *, is_short: bool) -> list[str]:
        name, status = self._name(rank), self.statuses.get(rank)
        if status is None:
            return [f"{name}: no answer, neither from the rank nor from its agent."]
        if status.text:
            return [f"{name} {status.text}.", *status.details]
        lines = [f"{name}:"]
        for own in status.collectives:
            lines.append(
                f"  group '{own.group}': number {own.number}, {own.described}, {own.state}, "
                f"started {own.age_s:g} s ago"
            )
        stacks = (is_short and status.script_stack) or status.stacks
        lines += status.details
        lines += [f"  {line}" for line in stacks.splitlines()[:_NUM_STACK_LINES]]
        return lines

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts.get(rank) else f"rank {rank}"


def _is_same_group(one: CollectiveStatus, other: CollectiveStatus) -> bool:
    return one.group == other.group and one.ranks == other.ranks


def _disagreement(waiting: Mapping[int, CollectiveStatus]) -> str:
    """Name the collectives if ranks wait in different ones or in different steps, else empty."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for rank, own in waiting.items():
        group = f"'{own.group}'" + (f" of {_ranks(own.ranks)}" if own.ranks else "")
        kinds.setdefault((own.what, own.where, group), []).append(rank)
    if len(kinds) < 2:
        return _one_sided(waiting)
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


def _one_sided(waiting: Mapping[int, CollectiveStatus]) -> str:
    """Say that all ranks send, or that all receive: else empty."""
    names = {own.what.partition(" ")[0] for own in waiting.values()}
    other = {"send": "receives", "recv": "sends"}.get("".join(names))
    if other is None or len(waiting) < 2:
        return ""
    return (
        f"all of {_ranks(waiting)} are in {names.pop()}, and none of them {other}. One of them has "
        "left out a call, or a backward pass that would have made it"
    )


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


def _ranks(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    return listed("rank", [*known[:_NUM_NAMED], *["..."] * (len(known) > _NUM_NAMED)])
