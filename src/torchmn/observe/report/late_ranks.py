"""Find ranks and hosts that are late in most steps: see `torchmn.observe.report.findings`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchmn.observe.read.recorded_run import Floats
from torchmn.observe.report.finding import (
    CURES,
    MAX_FINDINGS,
    MIN_SHARE,
    PHASE_TEXT,
    Finding,
    plural,
)
from torchmn.observe.report.summary import COLLECTIVE_PHASES, Summary, duration, listed, rank_list
from torchmn.record.records import PHASES, Phase

MIN_LATE_SHARE = 0.03  # by how much longer than the others a late rank computes, at least
SIMILAR = 0.7  # ranks that are late by this part of the latest one's time are late together with it
MIN_T = 4.0  # how many standard errors its mean lateness is above 0, at least
# Steps are divided into blocks for standard errors, since neighbouring steps are correlated.
MAX_BLOCKS = 20
MIN_CHANGING_SHARE = 0.05


def late_ranks(summary: Summary) -> Iterator[Finding]:
    """Find ranks and hosts that are late in most steps, and lateness that changes ranks."""
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
            what=f"A different rank is late in each step, by {duration(saved_s)} on average",
            evidence=f"no rank is the last in more than {last.max():.0%} of the steps",
            cure="Bind ranks to cores of their own, stop other programs on the hosts, and make "
            "batches equally long; averaging every few steps (schedule PeriodicAverage) evens out "
            "what is left.",
            is_fault=False,
        )


@dataclass(frozen=True, kw_only=True)
class _Lateness:
    """Lateness of a group of ranks, and the time saved if it were as fast as the others."""

    group: tuple[int, ...]
    excess: Floats  # seconds of each step
    saved_s: float
    replaced: Floats  # own times with those of the group as the median of the others
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
            saved_s=float((own.max(1) - replaced.max(1)).mean()),
            replaced=replaced,
            is_significant=mean > MIN_LATE_SHARE * usual_s and mean > MIN_T * error,
        )


def _groups(summary: Summary, own: Floats) -> list[tuple[int, ...]]:
    """Return groups that may be late: ranks similar to the latest one, and each host's ranks."""
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
    does = plural(PHASE_TEXT[phase]) if len(ranks) > 1 and not is_host else PHASE_TEXT[phase]
    evidence, cure = _why(summary, late, phase)
    share = late.saved_s / summary.step_s
    return Finding(
        kind="late host" if is_host else "late rank",
        share=share,
        what=f"{who}{every} {does} {longer} than {of_whom}",
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


def _late_phase(summary: Summary, group: tuple[int, ...]) -> tuple[Phase, float, float]:
    """Return the phase in which a group is latest, by how long, and the others' time."""
    group_s = summary.mean_phases[list(group)].min(0)
    others_s = np.median(np.delete(summary.mean_phases, group, axis=0), axis=0)
    excess = group_s - others_s
    for phase in COLLECTIVE_PHASES:
        excess[PHASES.index(phase)] = 0.0
    index = int(excess.argmax())
    return PHASES[index], float(excess[index]), float(others_s[index])


def _why(summary: Summary, late: _Lateness, phase: Phase) -> tuple[str, str]:
    """Return the evidence of the cause, and the cure."""
    if phase in ("data", "copy"):
        share = summary.of(phase)[:, late.group].mean() / summary.own[:, late.group].mean()
        evidence = f"it is {share:.0%} of what the rank does by itself in a step"
        return evidence, CURES[phase].replace("Load", "Look at its disk and its loaders; load")
    sharing = _shares_cores(summary, late.group)
    if sharing:
        cure = "Bind each rank to cores of its own, as torchmn run does (binding.txt of its log)."
        return sharing, cure
    late_s, group = float(late.excess.mean()), list(late.group)
    usual = ~summary.is_slow
    queued, ran = (summary.column(name)[usual].mean(0) for name in ("run_queue_s", "cpu_s"))
    queued_s, ran_s = _more_than_others(queued, group), _more_than_others(ran, group)
    if not np.isfinite(queued_s + ran_s) or summary.ranks[late.group[0]].start.device != "cpu":
        return (
            f"it was so by {duration(late_s)} in the mean step, while the others waited for it in "
            "the exchange",
            "Compare the hosts and devices with torchmn doctor, and see that all ranks get batches "
            "of the same size.",
        )
    blocked_s = late_s - queued_s - ran_s
    # A rank can be blocked only while it neither runs nor is ready to. If it never was, the others
    # polled in the exchange while they waited for it, which counts as running or being ready.
    idle_s = float((summary.steady[usual].sum(2).mean(0) - queued - ran)[group].mean())
    polled_s = max(0.0, blocked_s - max(0.0, idle_s))
    waited_s, cpu_s = float(queued[group].mean()), float(ran[group].mean())
    as_ready_s = min(polled_s, max(0.0, waited_s - queued_s))  # it has waited no longer itself
    queued_s += as_ready_s
    ran_s += polled_s - as_ready_s
    blocked_s -= polled_s
    share = min(1.0, max(queued_s, ran_s, blocked_s) / late_s)
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
        "it had a core all the time, so the core is slower than the others', or it has more work",
        "Compare the hosts with torchmn doctor (clock rate, memory, throttling), and see that all "
        "ranks get batches of the same size.",
    )


def _more_than_others(seconds: Floats, group: list[int]) -> float:
    """Return how much more than the others the ranks of a group have."""
    return float(seconds[group].min() - np.median(np.delete(seconds, group)))


def _shares_cores(summary: Summary, group: tuple[int, ...]) -> str:
    """Describe ranks of the group's host that share too few cores; empty if none do."""
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
