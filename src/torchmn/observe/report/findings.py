"""What limits a run: at most five findings, the most expensive first, each with its evidence.

A finding's share is the part of the mean step that would be saved without its cause, computed from
the recorded steps: a step lasts until the slowest rank is ready, so a rank that is late costs as
much as it is later than the next one. A rank is late by how long it computes itself: the time for
which it waits for the others in the exchange is not its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from torchmn.cluster.units import KiB
from torchmn.observe.report.summary import (
    COLLECTIVE_PHASES,
    Summary,
    bits,
    duration,
    grouped,
    listed,
    megabytes,
    rank_list,
)
from torchmn.record.records import PHASES, Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Kind = Literal[
    "late rank",
    "late host",
    "changing late ranks",
    "exchange",
    "slow link",
    "input",
    "slow steps",
    "slowing down",
    "phase",
]

MAX_FINDINGS = 5
MIN_SHARE = 0.02
"""Of a step: what costs less is left out."""
MIN_LATE_SHARE = 0.03
"""By how much longer than the others a late rank computes, at least."""
SIMILAR = 0.7
"""Ranks that are late by this part of the latest one's time are late together with it."""
MIN_T = 4.0
"""How many standard errors its mean lateness is above 0, at least."""
MAX_BLOCKS = 20
"""Into which steps are divided for standard errors: neighbouring steps resemble each other."""
MIN_CHANGING_SHARE = 0.05
MIN_LINK_SHARE = 0.1
"""Of its nominal rate that a link carries while gradients are exchanged, waiting included."""
MIN_LINK_BYTES = 256 * KiB
"""Of an exchange whose rate says something about the link: smaller ones are all latency."""
MIN_TAKEN = 0.1
"""What the exchange's threads take of cores is named from this share of what it adds to a step."""
MIN_LATE_END = 0.3
"""By what part of the time of an exchange it ends later on one host, at least."""
MIN_SLOWDOWN = 0.1

USUAL_SHARES: dict[Phase, float] = {
    "data": 0.05,
    "copy": 0.05,
    "encode": 0.05,
    "decode": 0.05,
    "optimizer": 0.15,
    "evaluation": 0.10,
    "checkpoint": 0.05,
    "other": 0.10,
}
"""Phases that are findings where they take more of a step."""

PHASE_TEXT: dict[Phase, str] = {
    "data": "waits for data",
    "copy": "copies data to the device",
    "forward": "computes in forward",
    "backward": "computes in backward",
    "exchange": "waits for the exchange",
    "encode": "encodes gradients",
    "decode": "decodes gradients",
    "optimizer": "updates parameters in the optimizer",
    "evaluation": "evaluates",
    "checkpoint": "writes checkpoints",
    "other": "runs code of the script that is not training",
}

CURES: dict[Phase, str] = {
    "data": "Load with more workers (num_workers, persistent_workers, prefetch_factor), decode "
    "less per sample, or keep the data on a local disk or in memory.",
    "copy": "Use pinned memory and non_blocking copies, and send samples in their smallest type.",
    "encode": "Use a cheaper codec, or none: this link may not need one (torchmn plan compares).",
    "decode": "Use a cheaper codec, or none: this link may not need one (torchmn plan compares).",
    "optimizer": "Use a fused or foreach optimizer.",
    "evaluation": "Evaluate less often, or on fewer samples.",
    "checkpoint": "Write checkpoints less often, or asynchronously to a local disk.",
    "other": "See it with torchmn run --profile: logging, metrics and .item() are common causes.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that limits a run."""

    kind: Kind
    share: float
    """Of the mean step, that would be saved."""
    what: str
    evidence: str
    cure: str
    is_fault: bool
    """Whether something is wrong with a rank, host or link, and not the training just so."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    phase: Phase | None = None

    @property
    def text(self) -> str:
        """All of it as running text."""
        return f"{self.what}: {self.evidence}. {self.cure}"


def find(summary: Summary) -> list[Finding]:
    """The findings of a run, the most expensive first."""
    found = [
        finding
        for search in (_late, _exchange, _slow_links, _phases, _slow_steps, _slowing_down)
        for finding in search(summary)
        if finding.share >= MIN_SHARE
    ]
    return sorted(found, key=lambda finding: -finding.share)[:MAX_FINDINGS]


def _late(summary: Summary) -> Iterator[Finding]:
    """Ranks and hosts that are late in most steps, and lateness that changes from rank to rank."""
    num_ranks = len(summary.ranks)
    if num_ranks < 2 or len(summary.steady) < 4:
        return
    own = summary.own[~summary.is_slow]
    for _ in range(MAX_FINDINGS):
        found = [_Lateness.of(own, group) for group in _groups(summary, own)]
        best = max(found, key=lambda late: late.saved_s if late.is_significant else 0.0)
        if not best.is_significant or best.saved_s < MIN_SHARE * summary.step_s:
            break
        yield _late_finding(summary, best)
        own = best.replaced
    saved_s = float((own.max(1) - np.median(own, axis=1)).mean())
    if saved_s >= MIN_CHANGING_SHARE * summary.step_s:
        last = np.bincount(own.argmax(1), minlength=num_ranks) / len(own)
        yield Finding(
            kind="changing late ranks",
            share=saved_s / summary.step_s,
            what=f"Another rank is late in each step, by {duration(saved_s)} on average",
            evidence=f"no rank is the last in more than {last.max():.0%} of the steps",
            cure="Bind ranks to cores of their own, stop other programs on the hosts, and make "
            "batches equally long; averaging every few steps (schedule PeriodicAverage) evens out "
            "what is left.",
            is_fault=False,
        )


@dataclass(frozen=True, kw_only=True)
class _Lateness:
    """How late a group of ranks is, and what would be saved if it were as fast as the others."""

    group: tuple[int, ...]
    excess: Floats
    """Seconds of each step."""
    usual_s: float
    saved_s: float
    replaced: Floats
    """Own times with those of the group as the median of the others."""
    is_significant: bool

    @classmethod
    def of(cls, own: Floats, group: tuple[int, ...]) -> _Lateness:
        others = np.delete(own, group, axis=1)
        usual = np.median(others, axis=1)
        slowest = own[:, group].min(1)  # all of the group are late
        excess = slowest - usual
        replaced = own.copy()
        replaced[:, group] = usual[:, None]
        blocks = [block.mean() for block in np.array_split(excess, min(MAX_BLOCKS, len(excess)))]
        error = float(np.std(blocks, ddof=1) / np.sqrt(len(blocks)))
        mean, usual_s = float(excess.mean()), float(usual.mean())
        return cls(
            group=group,
            excess=excess,
            usual_s=usual_s,
            saved_s=float((own.max(1) - replaced.max(1)).mean()),
            replaced=replaced,
            is_significant=mean > MIN_LATE_SHARE * usual_s and mean > MIN_T * error,
        )


def _groups(summary: Summary, own: Floats) -> list[tuple[int, ...]]:
    """The latest rank with those as late as it in the same phase, and each host, if several."""
    excess = (own - np.median(own, axis=1, keepdims=True)).mean(0)
    latest = int(excess.argmax())
    phase = _late_phase(summary, (latest,))[0]
    similar = [
        index
        for index in range(len(excess))
        if index == latest
        or (
            excess[index] > SIMILAR * excess[latest] > 0
            and _late_phase(summary, (index,))[0] == phase
        )
    ]
    group = tuple(similar) if len(similar) <= len(summary.ranks) // 2 else (latest,)
    hosts = [tuple(each) for each in summary.hosts.values() if len(each) > 1]
    return [group, *(hosts if len(summary.hosts) > 1 else [])]


def _late_finding(summary: Summary, late: _Lateness) -> Finding:
    ranks = [summary.ranks[index].start.rank for index in late.group]
    hosts = list(dict.fromkeys(summary.host(index) for index in late.group))
    host = hosts[0]
    is_host = len(hosts) == 1 and len(ranks) == len(summary.hosts[host]) > 1
    phase, phase_excess_s, usual_s = _late_phase(summary, late.group)
    ratio = phase_excess_s / usual_s if usual_s > 0 else float("inf")
    longer = f"{ratio:.0%} longer" if ratio < 10 else f"{duration(phase_excess_s)} longer"
    who = f"Host {host}" if is_host else f"{rank_list(ranks)} ({_host_list(hosts)})"
    of_whom = "those of the other hosts" if is_host else "the others"
    every = f", all its {len(ranks)} ranks," if is_host else ""
    verb, where = _verb_and_place(phase)
    if len(ranks) > 1 and not is_host:
        verb = _plural(verb)
    evidence, cure = _why(summary, late, phase)
    share = late.saved_s / summary.step_s
    return Finding(
        kind="late host" if is_host else "late rank",
        share=share,
        what=f"{who}{every} {verb} {longer}{where} than {of_whom}",
        evidence=evidence,
        cure=f"{cure} That would save {share:.0%} of each step.",
        is_fault=True,
        ranks=tuple(ranks),
        hosts=tuple(hosts),
        phase=phase,
    )


def _host_list(hosts: list[str]) -> str:
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    return f"hosts {listed(hosts[:4])}" if len(hosts) <= 4 else f"on {len(hosts)} hosts"


def _plural(words: str) -> str:
    verb, space, rest = words.partition(" ")
    return ("do" if verb == "does" else verb.removesuffix("s")) + space + rest


def _verb_and_place(phase: Phase) -> tuple[str, str]:
    words = PHASE_TEXT[phase]
    for end in (" in forward", " in backward"):
        if words.endswith(end):
            return words.removesuffix(end), end
    return words, ""


def _late_phase(summary: Summary, group: tuple[int, ...]) -> tuple[Phase, float, float]:
    """The phase in which a group is late the most: by how long, and how long others need."""
    group_s = summary.mean_phases[list(group)].min(0)
    others_s = np.median(np.delete(summary.mean_phases, group, axis=0), axis=0)
    excess = group_s - others_s
    for phase in COLLECTIVE_PHASES:
        excess[PHASES.index(phase)] = 0.0
    index = int(excess.argmax())
    return PHASES[index], float(excess[index]), float(others_s[index])


def _why(summary: Summary, late: _Lateness, phase: Phase) -> tuple[str, str]:
    """The evidence of the cause, and the cure."""
    if phase in ("data", "copy"):
        share = summary.of(phase)[:, late.group].mean() / summary.own[:, late.group].mean()
        evidence = f"it is {share:.0%} of what the rank does by itself in a step"
        return evidence, CURES[phase].replace("Load", "Look at its disk and its loaders; load")
    sharing = _shares_cores(summary, late.group)
    if sharing:
        cure = "Bind each rank to cores of its own: torchmn run does, --show-binding lists them."
        return sharing, cure
    late_s = float(late.excess.mean())
    queued_s = _more_than_others(summary, "run_queue_s", late.group)
    ran_s = _more_than_others(summary, "cpu_s", late.group)
    if not np.isfinite(queued_s + ran_s) or summary.ranks[late.group[0]].start.device != "cpu":
        return (
            f"it was so by {duration(late_s)} in the mean step, while the others waited for it in "
            "the exchange",
            "Compare the hosts and devices with torchmn doctor, and see that all ranks get batches "
            "of the same size.",
        )
    blocked_s = late_s - queued_s - ran_s
    share = min(1.0, max(queued_s, ran_s, blocked_s) / late_s)
    waited_s, cpu_s = (summary.column(c)[:, late.group].mean() for c in ("run_queue_s", "cpu_s"))
    if queued_s >= max(ran_s, blocked_s):
        return (
            f"it was ready to run but had no core for {share:.0%} of the time by which it is late, "
            f"so other programs use its core (run queue {1 + waited_s / max(cpu_s, 1e-9):.1f})",
            "End or move what runs there beside it, bind the rank to a free core, or raise the "
            "limit on its CPU time if there is one.",
        )
    if blocked_s > ran_s:
        return (
            f"it neither ran nor had to wait for a core for {share:.0%} of the time by which it is "
            "late, so it waited for something else",
            "Look for sleeping or reading code, slow disks, swapping and limits on CPU time "
            "(cgroup): torchmn doctor checks the host, py-spy shows the code.",
        )
    return (
        "it had a core all the time, so the core is slower than the others', or its work is more",
        "Compare the hosts with torchmn doctor (clock rate, memory, throttling), and see that all "
        "ranks get batches of the same size.",
    )


def _more_than_others(summary: Summary, column: str, group: tuple[int, ...]) -> float:
    """By how many seconds a group has more in a column of the mean step than other ranks."""
    means = summary.column(column)[~summary.is_slow].mean(0)
    return float(means[list(group)].min() - np.median(np.delete(means, group)))


def _shares_cores(summary: Summary, group: tuple[int, ...]) -> str:
    """Which ranks of its host are bound to the same cores, if these are fewer than ranks."""
    own = summary.ranks[group[0]].start
    sharing = [
        rank.start.rank
        for rank in summary.run.ranks
        if rank.start.host == own.host and set(rank.start.cpus) & set(own.cpus)
    ]
    cores = {
        core for rank in summary.run.ranks if rank.start.rank in sharing for core in rank.start.cpus
    }
    if len(sharing) < 2 or len(cores) >= len(sharing):
        return ""
    listed = ", ".join(map(str, sorted(cores)))
    return f"{rank_list(sharing).lower()} are bound to the same core ({listed})"


def _exchange(summary: Summary) -> Iterator[Finding]:
    share = summary.share_of_exposed_exchange
    exchanged = [link for link in summary.links if link.nbytes_per_step > 0]
    rate = "; it stays within one host" if len(summary.hosts) == 1 else ""
    if exchanged:
        link = max(exchanged, key=lambda each: each.nbytes_per_step)
        rate = (
            f"; {megabytes(link.nbytes_per_step)} a step go from {link.source} to {link.target}, "
            f"at {bits(link.bytes_per_s)} while it is busy"
        )
    waited_s, taken_s = float(summary.waited_s.mean()), float(summary.taken_s.mean())
    settings = summary.ranks[0].settings
    cures = []
    if settings.get("schedule", "every_step") == "every_step":
        cures.append("hide it (schedule='double_buffering')")
    if settings.get("codec", "none") in ("none", "float32"):
        cures.append("send fewer bytes (codec='float16' or 'int8')")
    cures.append("see what would pay with torchmn plan")
    evidence = [f"even the ranks that are ready last wait {duration(waited_s)} for it"]
    if taken_s > MIN_TAKEN * (waited_s + taken_s):
        evidence.append(f"its threads take {duration(taken_s)} of the core that computes")
        cures.append("leave the exchange a core (OMP_NUM_THREADS one less than cores)")
    yield Finding(
        kind="exchange",
        share=share,
        what=f"The exchange of gradients lengthens each step by {duration(waited_s + taken_s)}",
        evidence=" and ".join(evidence) + rate,
        cure=f"To shorten the step: {', or '.join(cures)}."
        + (" Check the network with torchmn doctor." if exchanged else ""),
        is_fault=False,
        phase="exchange",
    )


def _slow_links(summary: Summary) -> Iterator[Finding]:
    """Links far below their nominal rate, and hosts that data reach later than the others."""
    yield from _late_ends(summary)
    for link in summary.links:
        is_large = link.nbytes_per_step >= MIN_LINK_BYTES * summary.exchanges_per_step
        if link.share is not None and link.share < MIN_LINK_SHARE and is_large:
            lost = summary.share_of_exposed_exchange * (1 - link.share)
            yield Finding(
                kind="slow link",
                share=lost,
                what=f"The link from {link.source} to {link.target} carries "
                f"{bits(link.bytes_per_s)} of {bits(link.nominal_bytes_per_s or 0.0)}",
                evidence="while gradients were being exchanged over it",
                cure="Check cable, switch, interface and MTU with torchmn doctor.",
                is_fault=True,
                hosts=(link.source, link.target),
                phase="exchange",
            )


def _late_ends(summary: Summary) -> Iterator[Finding]:
    ends = summary.late_ends
    if not ends:
        return
    host = max(ends, key=lambda each: ends[each])
    late_s = ends[host] - float(np.median([late for other, late in ends.items() if other != host]))
    busy_s = float(summary.exchange_busy_s.mean())
    error_s = summary.exchanges_per_step * max(
        float(rank.clock.error_s.max()) for rank in summary.ranks
    )
    if late_s > MIN_LATE_END * busy_s and late_s > 2 * error_s:
        lost_s = min(late_s, float(summary.waited_s.mean()))
        yield Finding(
            kind="slow link",
            share=lost_s / summary.step_s,
            what=f"The exchange ends later on host {host} than on the others, by "
            f"{duration(late_s)} in a step of which it lasts {duration(busy_s)}",
            evidence="the ranks' clocks are compared, so what is sent to this host takes longer",
            cure="Check its network in both directions with torchmn doctor: cable, switch, "
            "interface, and what else uses it.",
            is_fault=True,
            hosts=(host,),
            phase="exchange",
        )


def _phases(summary: Summary) -> Iterator[Finding]:
    """Phases that take more than usual on all ranks."""
    by_rank = np.sort(summary.steady[~summary.is_slow].mean(0), axis=0)
    means = by_rank[(len(by_rank) - 1) // 2]  # of two ranks the one with less
    for phase, limit in USUAL_SHARES.items():
        seconds = float(means[PHASES.index(phase)])
        share = seconds / summary.step_s
        if share > limit:
            size = f"{duration(seconds)} of {duration(summary.step_s)} in the mean step"
            yield Finding(
                kind="input" if phase == "data" else "phase",
                share=share,
                what=f"All ranks {_plural(PHASE_TEXT[phase])} for {share:.0%} of each step",
                evidence=size,
                cure=CURES[phase],
                is_fault=phase == "data",
                phase=phase,
            )


def _slow_steps(summary: Summary) -> Iterator[Finding]:
    """Some steps that last far longer than the rest, without evaluations and checkpoints."""
    collective = summary.of("evaluation", "checkpoint")
    totals = (summary.steady.sum(2) - collective).max(1)
    usual = float(np.median(totals))
    slow = summary.is_slow
    if not slow.any():
        return
    lost = float((totals[slow] - usual).sum()) / float(totals.sum())
    excess = summary.steady[slow] - np.median(summary.steady, axis=0)
    excess[:, :, PHASES.index("exchange")] = excess[:, :, [PHASES.index("exchange")]].min(1)
    for phase in ("evaluation", "checkpoint"):
        excess[:, :, PHASES.index(phase)] = 0.0
    by_phase = excess.clip(0).max(1).sum(0)
    phase = PHASES[int(by_phase.argmax())]
    lateness = excess[:, :, int(by_phase.argmax())]
    last = grouped(dict(enumerate(lateness.argmax(1).tolist())))
    index, steps = max(last.items(), key=lambda item: len(item[1]))
    is_one_rank = (
        len(summary.ranks) > 1
        and len(steps) > 0.8 * slow.sum()
        and np.median(lateness[steps].max(1)) > 2 * np.median(np.median(lateness[steps], axis=1))
    )
    rank = summary.ranks[index].start
    who = f"mostly rank {rank.rank} (host {rank.host})" if is_one_rank else "on several ranks"
    numbers = summary.step[summary.num_warmup :][slow]
    spacing = np.diff(numbers)
    is_periodic = len(spacing) > 2 and np.ptp(spacing) <= 0.2 * np.median(spacing)
    period = f", every {np.median(spacing):.0f} steps" if is_periodic else ""
    yield Finding(
        kind="slow steps",
        share=lost,
        what=f"{slow.mean():.1%} of the steps last more than twice as long as the others{period}",
        evidence=f"their extra time is in {phase}, {who}; the longest is step "
        f"{summary.step[summary.num_warmup :][int(totals.argmax())]} with "
        f"{duration(float(totals.max()))}",
        cure="Look at what happens in these steps (torchmn run --profile): the first batch of an "
        "epoch, garbage collection, other programs.",
        is_fault=False,
        ranks=(rank.rank,) if is_one_rank else (),
        phase=phase,
    )


def _slowing_down(summary: Summary) -> Iterator[Finding]:
    """Steps that become longer in the course of the run, on some rank."""
    own = summary.own
    if len(own) < 40:
        return
    quarters = [np.median(part, axis=0) for part in np.array_split(own, 4)]
    growth = quarters[-1] / np.maximum(quarters[0], 1e-9) - 1
    is_steady_growth = np.all(np.diff(quarters, axis=0) > -0.02 * quarters[0], axis=0)
    growing = np.flatnonzero((growth > MIN_SLOWDOWN) & is_steady_growth)
    if not len(growing):
        return
    most = growing[growth[growing].argmax()]
    ranks = [summary.ranks[index].start.rank for index in growing]
    everywhere = len(ranks) == len(summary.ranks)
    part = len(own) // 4
    excess = summary.steady[-part:, growing].mean(0) - summary.steady[:part, growing].mean(0)
    for phase in COLLECTIVE_PHASES:
        excess[:, PHASES.index(phase)] = 0.0
    phase = PHASES[int(excess.mean(0).argmax())]
    yield Finding(
        kind="slowing down",
        share=max(0.0, float(np.median(own.max(1)) - quarters[0].max())) / summary.step_s,
        what=("All ranks become" if everywhere else f"{rank_list(ranks)} became")
        + f" {growth[most]:.0%} slower in the course of the run",
        evidence=f"the own part of a step grew from {duration(float(quarters[0][most]))} to "
        f"{duration(float(quarters[-1][most]))} on rank {summary.ranks[most].start.rank}, in "
        f"{phase}",
        cure="Look for lists and graphs that grow with each step, for throttling by heat, and for "
        "programs that were started later.",
        is_fault=not everywhere,
        ranks=tuple(ranks) if not everywhere else (),
        phase=phase,
    )
