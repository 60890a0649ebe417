"""Which calls are in one run of the same function."""

from __future__ import annotations

from torchmn.base.script_line import script_line
from torchmn.nn.functions.recomputation import is_before, position


def test_the_line_of_the_script() -> None:
    assert script_line().startswith("test_source_line.py:")
    assert script_line().endswith(" in test_the_line_of_the_script")


def test_a_later_line_and_what_it_calls() -> None:
    first = position()
    second = position()
    deeper = (lambda: position())()
    assert is_before(first, second)
    assert is_before(first, deeper)
    assert not is_before(second, first)
    assert not is_before(first, first)
    assert not is_before(deeper, position()), "not what was called has returned"


def test_loops() -> None:
    before = position()
    inside, after_it = [], []
    for _ in range(2):
        inside.append(position())
        after_it.append(position())
    later = position()
    assert is_before(inside[0], after_it[0])
    assert not is_before(after_it[0], inside[1]), "the loop has come back"
    assert not is_before(inside[1], later), "the loop has ended"
    assert not is_before(before, inside[0]), "a loop has begun"
    assert is_before(before, later)
    index = 0
    while index < 2:
        index += 1
        within = position()
    assert not is_before(within, position())


def test_another_run_of_the_function() -> None:
    def run() -> list:
        return [position(), position()]

    first, second = run(), run()
    assert is_before(first[0], first[1])
    assert not is_before(first[0], second[1])
