"""How long processes have been stopped."""

from __future__ import annotations

from torchmn.control.processes import StoppedProcesses


def test_one_that_continues_is_counted_again_from_its_next_stop() -> None:
    stopped = StoppedProcesses[str]()
    for now, seen in enumerate([("a", "b"), ("a", "b"), ("b",), ("a", "b")]):
        stopped.update(seen, float(now))
    assert sorted(stopped) == ["a", "b"]
    assert stopped.for_longer_than(1.0, now=3.0) == ["b"]
    assert sorted(stopped.for_longer_than(1.0, now=4.0)) == ["a", "b"]


def test_none_before_its_time() -> None:
    stopped = StoppedProcesses[int]()
    stopped.update([1], now=10.0)
    assert stopped.for_longer_than(2.0, now=11.9) == []
    assert stopped.for_longer_than(2.0, now=12.0) == [1]
