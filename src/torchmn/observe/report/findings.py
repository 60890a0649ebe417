"""Find what limits a run: at most five findings with evidence, the most expensive first.

A finding's share is the part of the mean step that would be saved without its cause, computed from
the recorded steps: a step lasts until the slowest rank is ready, so a rank that is late costs as
much as it is later than the next one. A rank is late by how long it computes itself: the time for
which it waits for the others in the exchange is not its own.
"""

from collections.abc import Iterator

import numpy as np

from torchmn.cluster.units import KiB
from torchmn.observe.report.finding import (
    CURES,
    MAX_FINDINGS,
    MIN_SHARE,
    PHASE_TEXT,
    Finding,
    plural,
)
from torchmn.observe.report.late_ranks import late_ranks
from torchmn.observe.report.summary import (
    COLLECTIVE_PHASES,
    Summary,
    bits,
    duration,
    megabytes,
    rank_list,
)
from torchmn.record.records import PHASES, Phase

# Of its nominal rate that a link carries while gradients are exchanged, waiting included.
MIN_LINK_SHARE = 0.1
# Of an exchange whose rate says something about the link: smaller ones are all latency.
MIN_LINK_BYTES = 256 * KiB
# What the exchange's threads take of cores is named from this share of what it adds to a step.
MIN_TAKEN = 0.1
MIN_SLOWDOWN = 0.1

# Phases that are findings where they take more of a step.
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


def find(summary: Summary) -> list[Finding]:
    """Return the findings of a run, the most expensive first."""
    found = [
        finding
        for search in (late_ranks, _exchange, _slow_links, _phases, _slow_steps, _slowing_down)
        for finding in search(summary)
        if finding.share >= MIN_SHARE
    ]
    return sorted(found, key=lambda finding: -finding.share)[:MAX_FINDINGS]


def _exchange(summary: Summary) -> Iterator[Finding]:
    share = summary.share_of_exposed_exchange
    exchanged = [link for link in summary.links if link.nbytes_per_step > 0]
    is_within_host = len(summary.hosts) == 1 and not exchanged
    rate = "; it stays within one host" if is_within_host else ""
    if exchanged:
        link = exchanged[0]  # the one that carries most
        rate = (
            f"; {megabytes(link.nbytes_per_step)} a step go from {link.source} to {link.target}, "
            f"at {bits(link.bytes_per_s)} while it is busy"
        )
    waited_s, taken_s = float(summary.waited_s.mean()), float(summary.taken_s.mean())
    settings = summary.ranks[0].settings
    cures = []
    if settings.get("schedule", "every_step") == "every_step":
        cures.append("hide it (schedule='double_buffering', whose gradients are a step old)")
    # Within one host nothing is encoded, or encoding takes longer than what it saves.
    if not is_within_host and settings.get("codec", "none") in ("none", "float32"):
        cures.append("send fewer bytes (codec='float16' or 'int8')")
    cures.append("compare other settings with torchmn plan")
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
    """Find links far below their nominal rate."""
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


def _phases(summary: Summary) -> Iterator[Finding]:
    """Find phases that take longer than usual on all ranks."""
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
                what=f"All ranks {plural(PHASE_TEXT[phase])} for {share:.0%} of each step",
                evidence=size,
                cure=CURES[phase],
                is_fault=phase == "data",
                phase=phase,
            )


def _slow_steps(summary: Summary) -> Iterator[Finding]:
    """Find steps that last far longer than others, evaluations and checkpoints left out."""
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
    # Not the count of steps: while a rank does something after one, the others wait in the next.
    late_s = excess[:, :, int(by_phase.argmax())].clip(0)
    by_rank = late_s.sum(0)
    index = int(by_rank.argmax())
    middle = np.sort(by_rank)[(len(by_rank) - 1) // 2]  # of two ranks the one with less
    is_one_rank = len(by_rank) > 1 and by_rank[index] > max(0.8 * late_s.max(1).sum(), 2 * middle)
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
    """Find a rank whose steps become longer in the course of the run."""
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
