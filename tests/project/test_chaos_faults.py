"""The faults that `make chaos` draws and its checks: the parts that start no process."""

import json
from collections import Counter
from pathlib import Path

import pytest

EVERYTHING = ("hosts", "disks", "cgroups")


def test_a_seed_and_a_number_repeat_a_run(load) -> None:
    faults = load("chaos.faults")
    first = [faults.draw(7, number, EVERYTHING) for number in range(50)]
    assert first == [faults.draw(7, number, EVERYTHING) for number in range(50)]
    assert first != [faults.draw(8, number, EVERYTHING) for number in range(50)]


def test_every_fault_and_setting_is_drawn_in_a_valid_combination(load) -> None:
    faults, settings = load("chaos.faults"), load("chaos.settings")
    drawn = [faults.draw(1, number, EVERYTHING) for number in range(1500)]
    assert {fault.kind for _, fault in drawn} == set(faults.KINDS)
    assert {setting for setting, _ in drawn} == set(settings.SETTINGS)
    assert Counter(fault.moment for _, fault in drawn).keys() == {"start", "step", "write"}
    for setting, fault in drawn:
        assert 0 <= fault.rank < setting.num_workers
        assert 0 <= fault.step < setting.num_steps
        assert setting.has_hosts or not fault.kind.startswith("network")
        assert faults.fits(fault.kind, setting)
        assert (fault.step == 0) == (fault.when == "start")


def test_without_root_no_test_hosts_or_disks_are_drawn(load) -> None:
    faults = load("chaos.faults")
    drawn = [faults.draw(1, number, ()) for number in range(300)]
    assert not any(setting.has_hosts for setting, _ in drawn)
    assert not {fault.kind for _, fault in drawn} & faults.NEEDS.keys()


def test_the_last_message_must_name_the_cause(load) -> None:
    faults, expectations = load("chaos.faults"), load("chaos.expectations")
    one = load("chaos.settings").Setting()

    def is_named(kind: str, rank: int, *texts: str, **more) -> bool | None:
        lines = [load("chaos.job").Line(float(at), text) for at, text in enumerate(texts)]
        return expectations.is_named(lines, faults.Fault(kind=kind, rank=rank, step=9, **more), one)

    begin = "torchmn: 2 ranks with gloo on vm, logs in logs"
    killed = "torchmn: rank 1 on vm was ended by SIGKILL."
    assert is_named("kill", 1, begin, killed)
    assert not is_named("kill", 0, begin, killed)
    assert not is_named("kill", 1, begin)
    assert not is_named("kill", 1, begin, killed, "torchmn: rank 0 on vm failed.")
    hang = "torchmn: no sum; rank 1 did not reach it: rank 1 on vm: its process is stopped."
    assert is_named("SIGSTOP", 1, begin, hang)
    assert not is_named("SIGSTOP", 0, begin, hang)
    assert not is_named("SIGSTOP", 1, begin, killed)
    assert is_named("launcher killed", 1, begin) is None


@pytest.mark.parametrize("before", ["", "W1126 17:00:00 Sending process 71 closing sig"])
def test_under_torchrun_the_only_message_is_read(load, before: str) -> None:
    """It has the words of the line with which `torchmn run` starts, and may follow a torn line."""
    faults, expectations, job = (
        load(f"chaos.{name}") for name in ("faults", "expectations", "job")
    )
    setting = load("chaos.settings").Setting(launcher="torchrun")
    fault = faults.Fault(kind="exit", rank=1, step=9, place="forward", status=3)
    message = "torchmn: rank 1 on vm failed with exit code 3."
    texts = ["[1] SystemExit: 3", f"{before}{message}", "E1126 17:00:01 failed (exitcode: 3)"]
    lines = [job.Line(float(at), text) for at, text in enumerate(texts)]
    assert expectations.last_message(lines) == message
    assert expectations.is_named(lines, fault, setting)
    assert expectations.detection_s(lines, 0.0, fault, setting) == 1.0


def test_limits_fail_for_hangs_orphans_and_wrong_bits(load, tmp_path: Path) -> None:
    table = load("chaos.table")
    good = {
        "seed": 1,
        "number": 1,
        "setting": {"name": "2", "workers": [2], "is_exact": True},
        "fault": {"kind": "kill", "rank": 0, "when": "step 3"},
        "continued": False,
        "hang": False,
        "orphans": [],
        "bit_equal": True,
        "named": True,
        "detection_s": 0.2,
        "end_s": 0.5,
        "problems": [],
        "hang_limit_s": 15.0,
    }
    path = tmp_path / "runs.jsonl"
    for _ in range(200):
        table.append(path, good)
    assert all(bar.holds for bar in table.bars(table.read(path)))
    bad = (
        {"hang": True},
        {"orphans": ["7 S a"]},
        {"bit_equal": False},
        {"end_s": 30.0},
        {"named": False},
    )
    for change in bad:
        records = [{**good, **change}] * 200
        assert [bar.holds for bar in table.bars(records)].count(False) == 1, change
    assert not table.bars([good] * 199)[0].holds


def test_records_contain_no_folders(load, tmp_path: Path) -> None:
    table = load("chaos.table")
    path = tmp_path / "runs.jsonl"
    message = "rank 1 of group 'a/b' failed; its output is in /some/where/logs/rank1.log (7/8)."
    table.append(path, {"message": message})
    assert json.loads(path.read_text()) == {
        "message": "rank 1 of group 'a/b' failed; its output is in rank1.log (7/8)."
    }
