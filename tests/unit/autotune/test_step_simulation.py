"""Two threads on the cores of a rank."""

from __future__ import annotations

import pytest

from torchmn.autotune.step_simulation import Compute, Core, Mark, Part, Start, Wait, simulate

CODE = Part(2.0, 2.0)
SEND = Part(4.0, 1.0, is_on_link=True)


def seconds(*program, **core: float) -> float:
    return simulate([*program, Mark()], Core(**core))[0]


@pytest.mark.parametrize(("num", "expected_s"), [(2.0, 6.0), (1.0, 8.0), (0.5, 16.0)])
def test_computation_of_both_threads_shares_the_cores(num: float, expected_s: float) -> None:
    assert seconds(Start(0, [CODE]), Compute(6.0), Wait(0), num=num) == pytest.approx(expected_s)


def test_a_transfer_delays_by_what_it_needs_of_the_core() -> None:
    assert seconds(Start(0, [SEND]), Compute(6.0), Wait(0)) == pytest.approx(7.0)
    assert seconds(Start(0, [SEND]), Compute(1.0), Wait(0)) == pytest.approx(4.0)
    # the core is as busy as the link is with two ranks on it
    assert seconds(Start(0, [SEND]), Compute(6.0), Wait(0), num=0.5) == pytest.approx(14.0)


def test_exchanges_are_made_one_after_another() -> None:
    program = [Start(0, [SEND]), Start(1, [SEND]), Wait(1), Mark(), Wait(0)]
    assert simulate([*program, Mark()], Core()) == pytest.approx([8.0, 8.0])


def test_what_was_never_started_is_not_waited_for() -> None:
    assert seconds(Wait(7), Compute(1.0), Start(0, []), Wait(0)) == pytest.approx(1.0)


def test_a_transfer_disturbs_and_waits_for_a_core_that_computes() -> None:
    assert seconds(Start(0, [SEND]), Compute(3.0), interference=0.2) == pytest.approx(4.6)
    assert seconds(Start(0, [SEND]), Compute(1.0), Wait(0), wake_s=0.5) == pytest.approx(4.5)
    assert seconds(Start(0, [SEND]), Wait(0), wake_s=0.5) == pytest.approx(4.0)
    assert seconds(Start(0, [SEND]), Compute(1.0), Wait(0), wake_s=0.5, num=2) == pytest.approx(4)
