"""Findings name the fault that a run was given, what it costs, and nothing in a healthy run."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.recorded_runs import ImitatedRun
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.finding import MAX_FINDINGS, Finding
from torchmn.observe.report.findings import find
from torchmn.observe.report.summary import Summary, summarize
from torchmn.record.records import Phase


def summary_of(imitated: ImitatedRun, folder: Path) -> Summary:
    return summarize(read_run(imitated.write(folder)))


def findings_of(imitated: ImitatedRun, folder: Path) -> list[Finding]:
    return find(summary_of(imitated, folder))


def faults_of(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_fault]


@pytest.mark.parametrize("seed", range(20))
def test_no_fault_is_found_in_a_healthy_run(tmp_path: Path, seed: int) -> None:
    imitated = ImitatedRun(
        num_ranks=2 + seed % 7,
        ranks_per_host=1 + seed % 3,
        seed=seed,
        jitter=0.01 + 0.01 * (seed % 4),
    )
    assert faults_of(findings_of(imitated, tmp_path)) == []


@pytest.mark.parametrize("phase", ["backward", "forward", "data", "other"])
@pytest.mark.parametrize(("num_ranks", "per_host", "rank"), [(2, 1, 1), (4, 1, 2), (8, 4, 5)])
def test_a_late_rank_is_found_in_its_phase(
    tmp_path: Path, phase: Phase, num_ranks: int, per_host: int, rank: int
) -> None:
    """Though the exchange makes the steps of all ranks equally long."""
    factor = 1.0 + 0.02 / {"backward": 0.06, "forward": 0.03, "data": 0.002, "other": 0.001}[phase]
    healthy = ImitatedRun(num_ranks=num_ranks, ranks_per_host=per_host)
    slow = replace(healthy, slower={(rank, phase): factor})
    summary = summary_of(slow, tmp_path / "slow")
    seconds = [steps.steps.seconds.mean() for steps in summary.ranks]
    assert max(seconds) / min(seconds) < 1.02
    (fault,) = faults_of(find(summary))
    assert (fault.kind, fault.ranks, fault.phase) == ("late rank", (rank,), phase)
    assert fault.hosts == (f"host{rank // per_host}",)
    if num_ranks > 2:  # of two ranks one has no others to compare with but the other
        usual_s = summary_of(healthy, tmp_path / "healthy").step_s
        assert fault.share == pytest.approx(1 - usual_s / summary.step_s, abs=0.02)


@pytest.mark.parametrize("polls", ["", "running", "ready"])
@pytest.mark.parametrize(
    ("times", "evidence"),
    [
        ({"run_queue": {1: 0.3}}, "ready to run but had no core"),
        ({"blocked": {1: 0.3}}, "waited for something else"),
        ({}, "the core is slower"),
    ],
)
def test_why_a_rank_is_late(
    tmp_path: Path, times: dict[str, Any], evidence: str, polls: Any
) -> None:
    """What it did in the time by which it is late, compared with the other ranks.

    These may wait for it in a loop, as MPI does, also where other programs have their cores.
    """
    imitated = ImitatedRun(slower={(1, "backward"): 1.5}, polls=polls, **times)
    assert evidence in faults_of(findings_of(imitated, tmp_path))[0].evidence


def test_ranks_that_share_a_core(tmp_path: Path) -> None:
    cores = {0: [0], 1: [1], 2: [2], 3: [2]}
    slower: dict[tuple[int, Phase], float] = {(2, "backward"): 1.8, (3, "backward"): 1.8}
    imitated = ImitatedRun(ranks_per_host=4, num_ranks=8, slower=slower, cpus=cores)
    faults = faults_of(findings_of(imitated, tmp_path))
    assert {rank for fault in faults for rank in fault.ranks} == {2, 3}
    assert "ranks 2-3 are bound to the same core (2)" in faults[0].evidence


def test_a_slow_host_is_one_finding(tmp_path: Path) -> None:
    slower: dict[tuple[int, Phase], float] = {
        (rank, phase): 1.3 for rank in (4, 5) for phase in ("forward", "backward")
    }
    imitated = ImitatedRun(num_ranks=8, ranks_per_host=2, slower=slower)
    (fault,) = faults_of(findings_of(imitated, tmp_path))
    assert (fault.kind, fault.hosts, fault.ranks) == ("late host", ("host2",), (4, 5))
    assert fault.what.startswith("Host host2, all its 2 ranks,")


def test_two_late_ranks_are_two_findings(tmp_path: Path) -> None:
    slower: dict[tuple[int, Phase], float] = {(1, "backward"): 1.3, (6, "data"): 20.0}
    faults = faults_of(findings_of(ImitatedRun(num_ranks=8, slower=slower), tmp_path))
    assert {(fault.ranks, fault.phase) for fault in faults} == {((6,), "data"), ((1,), "backward")}


@pytest.mark.parametrize(
    ("changes", "kind", "phase"),
    [
        ({"jitter": 0.25}, "changing late ranks", None),
        ({"bandwidth_bytes_per_s": 1e8}, "exchange", "exchange"),
        ({"slower": {(rank, "data"): 15.0 for rank in range(4)}}, "input", "data"),
        ({"slower": {(rank, "optimizer"): 8.0 for rank in range(4)}}, "phase", "optimizer"),
        ({"extra": {"encode": (1, 0.02)}}, "phase", "encode"),
        ({"extra": {"checkpoint": (10, 0.2)}}, "phase", "checkpoint"),
        ({"extra": {"other": (12, 0.4)}}, "slow steps", "other"),
        ({"slow_steps": dict.fromkeys((15, 30, 45), (2, "data", 0.5))}, "slow steps", "data"),
    ],
)
def test_what_limits_all_ranks_comes_first(
    tmp_path: Path, changes: dict[str, Any], kind: str, phase: str | None
) -> None:
    first = findings_of(ImitatedRun(**changes), tmp_path)[0]
    assert (first.kind, first.phase) == (kind, phase)
    assert 0.02 < first.share < 1
    assert first.evidence
    assert first.cure


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"slow_steps": dict.fromkeys((15, 30, 45), (1, "other", 0.5))}, (1,)),
        ({"extra": {"other": (12, 0.4)}}, ()),
    ],
)
def test_whose_steps_are_slow(
    tmp_path: Path, num_ranks: int, changes: dict[str, Any], ranks: tuple[int, ...]
) -> None:
    """Of one rank that the others wait for, or of all."""
    found = findings_of(ImitatedRun(num_ranks=num_ranks, **changes), tmp_path)
    (slow,) = (each for each in found if each.kind == "slow steps")
    assert slow.ranks == ranks
    assert ("mostly rank 1 (host host1)" in slow.evidence) == bool(ranks)


@pytest.mark.parametrize(
    ("others_cpu_s", "bandwidth", "taken_s"),
    [
        (None, 1e9, 0.0),
        (0.004, 1e9, 0.004),  # the other threads ran no longer
        (1.0, 1e9, 0.008),  # an exchange was under way no longer, besides that of the last bucket
        (1.0, 1e8, 0.018),  # the training thread waited no longer for its core
    ],
)
def test_what_the_exchange_takes_from_the_training_thread_is_exposed(
    tmp_path: Path, others_cpu_s: float | None, bandwidth: float, taken_s: float
) -> None:
    imitated = ImitatedRun(
        jitter=0.0,
        run_queue=dict.fromkeys(range(4), 0.3),  # of 60 ms
        others_cpu_s=others_cpu_s,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=0.0,
        bucket_nbytes=(4_000_000, 4_000_000, 2_000_000),
    )
    summary = summary_of(imitated, tmp_path)
    assert float(summary.taken_s.mean()) == pytest.approx(taken_s, rel=1e-3)
    exposed_s = float((summary.waited_s + summary.taken_s.mean(1)).mean())
    assert float(summary.exposed_s.mean()) == pytest.approx(exposed_s)


def test_the_exposed_exchange_is_what_the_last_rank_waits_for(tmp_path: Path) -> None:
    """A late rank does not make it longer: the others wait for that rank, not for the network."""
    healthy = summary_of(ImitatedRun(jitter=0.0), tmp_path / "healthy")
    expected_s = 2e-4 + 2_000_000 / 1e9  # the last bucket, which nothing hides
    assert float(healthy.exposed_s.mean()) == pytest.approx(expected_s, rel=1e-3)
    late = ImitatedRun(jitter=0.0, slower={(1, "backward"): 2.0})
    summary = summary_of(late, tmp_path / "late")
    assert float(summary.exposed_s.mean()) == pytest.approx(expected_s, rel=1e-3)
    assert summary.share_of_waiting > 0.2


def test_the_growth_is_that_of_the_rank_that_becomes_slower(tmp_path: Path) -> None:
    """Not of the slowest rank, which may be another one."""
    grows = {step: (1, "backward", step * 1.5e-3) for step in range(100)}
    slower: dict[tuple[int, Phase], float] = {(2, "backward"): 2.0}
    imitated = ImitatedRun(num_steps=100, slow_steps=grows, slower=slower, jitter=0.0)  # type: ignore[arg-type]
    found = {finding.kind: finding for finding in findings_of(imitated, tmp_path)}
    assert "on rank 1" in found["slowing down"].evidence
    first, last = map(float, re.findall(r"([0-9.]+) ms", found["slowing down"].evidence))
    assert f"{last / first - 1:.0%}" in found["slowing down"].what


def test_the_most_expensive_comes_first_and_five_at_most(tmp_path: Path) -> None:
    slower: dict[tuple[int, Phase], float] = {
        (rank, "backward"): 1.2 + rank for rank in range(1, 8)
    }
    slower |= {(rank, "optimizer"): 9.0 for rank in range(16)}
    imitated = ImitatedRun(num_ranks=16, slower=slower, extra={"encode": (1, 0.1)})
    findings = findings_of(replace(imitated, bandwidth_bytes_per_s=2e7), tmp_path)
    shares = [finding.share for finding in findings]
    assert shares == sorted(shares, reverse=True)
    assert len(findings) == MAX_FINDINGS


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_short_runs(tmp_path: Path, num_ranks: int, num_steps: int) -> None:
    imitated = ImitatedRun(num_ranks=num_ranks, num_steps=num_steps)
    assert faults_of(findings_of(imitated, tmp_path)) == []


def test_slowest_steps_and_their_causes(tmp_path: Path) -> None:
    imitated = ImitatedRun(
        slow_steps={20: (2, "data", 1.0), 31: (0, "backward", 0.4)}, extra={"checkpoint": (50, 0.3)}
    )
    slow = summary_of(imitated, tmp_path).slowest_steps()
    assert [(each.step, each.rank, each.phase) for each in slow] == [
        (20, 2, "data"),
        (31, 0, "backward"),
        (49, None, "checkpoint"),
    ]
    assert slow[0].excess_s == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_codec_is_advised_for_what_crosses_between_hosts(tmp_path: Path, num_hosts: int) -> None:
    """Within a host codecs encode nothing, or cost more than they save."""
    run = ImitatedRun(ranks_per_host=4 // num_hosts, bandwidth_bytes_per_s=1e8)
    (exchange,) = (each for each in findings_of(run, tmp_path) if each.kind == "exchange")
    assert ("codec=" in exchange.cure) == (num_hosts > 1)
    assert ("stays within one host" in exchange.evidence) == (num_hosts == 1)


@pytest.mark.parametrize(
    ("nominal", "sizes", "is_slow"),
    [
        (1.25e9, (4_000_000,), True),  # 10 Gb/s that carry 0.3
        (1.25e8, (4_000_000,), False),
        (0.0, (4_000_000,), False),
        (1.25e9, (20_000,) * 20, False),  # too small to tell
    ],
)
def test_a_link_far_below_its_nominal_rate(
    tmp_path: Path, nominal: float, sizes: tuple[int, ...], is_slow: bool
) -> None:
    run = ImitatedRun(
        num_ranks=2, bucket_nbytes=sizes, bandwidth_bytes_per_s=4e7, link_bytes_per_s=nominal
    )
    slow = [each for each in findings_of(run, tmp_path) if each.kind == "slow link"]
    assert [each.hosts for each in slow] == [("host0", "host1"), ("host1", "host0")] * is_slow
    if is_slow:
        assert "of 10.00 Gb/s" in slow[0].what


def test_rates_of_links(tmp_path: Path) -> None:
    """Of 10 MB a step, at 1 GB/s and 0.2 ms a bucket."""
    summary = summary_of(ImitatedRun(num_ranks=2), tmp_path)
    assert [(link.source, link.target) for link in summary.links] == [
        ("host0", "host1"),
        ("host1", "host0"),
    ]
    for link in summary.links:
        assert link.nbytes_per_step == 1e7
        assert link.bytes_per_s == pytest.approx(1e7 / (0.01 + 3 * 2e-4), rel=0.01)
