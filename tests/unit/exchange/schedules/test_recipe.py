"""CONTRIBUTING's recipe for a schedule, step by step, with a toy; how much a schedule may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contracts.suites.schedule_contracts import check_all
from torchmn.base import names
from torchmn.exchange.optimizer import create
from torchmn.exchange.schedules import Schedule, Traits
from torchmn.testing import run_ranks


class AtTheEnd(Schedule):
    """The toy: a file of its own in ``schedules/``. Waits for all means when backward has ended."""

    traits = Traits(name="at_the_end")

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        self._exchange.assign(self._exchange.start())

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if not self._reducer.is_active:
            self._reducer.shadow_exchange()
            return None
        if closure is None:
            self._reducer.exchange_if_late()
        return self._inner.step(closure)


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_toy_schedule(monkeypatch: pytest.MonkeyPatch, size: int, codec: str) -> None:
    """Under its name it keeps all contracts of what it declares."""
    monkeypatch.setitem(names.SCHEDULE_TRAITS, "at_the_end", names.ScheduleTraits())
    monkeypatch.setitem(create.SCHEDULES, "at_the_end", AtTheEnd)
    run_ranks(lambda comm: check_all(comm, "at_the_end", codec), size)


def test_how_much_a_schedule_is() -> None:
    """Four methods, state and traits; what few schedules need is the rest."""
    public = {name for name in {*vars(Schedule), *Schedule.__annotations__} if name[0] != "_"}
    methods, state = (
        {"attach", "backward_ended", "step", "flush"},
        {"state_dict", "load_state_dict"},
    )
    optional = {"name", "before_access", "rebuild", "close"}
    assert public == methods | state | {"traits"} | optional
