"""What was wrong once, put back: the user scripts notice each of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torchmn.errors import TorchmnError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.gradients.buckets import Slot
from torchmn.gradients.reducer import GradientReducer
from torchmn.optimizer import multi_node_optimizer

from .running import check_exact, on_ranks
from .suite import all_scripts

Patch = Callable[[pytest.MonkeyPatch], None]


def gradients_are_slots(patch: pytest.MonkeyPatch) -> None:
    always = property(lambda self: True, lambda self, value: None)
    patch.setattr(GradientReducer, "gradient_as_bucket_view", always, raising=False)


def slots_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    gradients_are_slots(patch)
    patch.setattr(Slot, "current_tensor", lambda self: self.tensor)


def nobody_takes_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(multi_node_optimizer, "owners_of", lambda parameters: [])


def layouts_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientReducer, "_is_other_layout", lambda self: False)


def passes_cannot_be_repeated(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: GradientReducer) -> None:
        raise RuntimeError("the backward pass before this did not reach its end")

    patch.setattr(GradientReducer, "_give_up_pass", give_up)


def missing_gradients_are_zeros(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketSet, "presence", property(lambda self: [True for _ in self.slots]))


OLD: dict[Patch, str] = {
    gradients_are_slots: "pcgrad",
    slots_are_not_looked_at: "replace_data_of_gradients",
    nobody_takes_over: "cell_run_twice",
    layouts_stay: "frozen_then_unfrozen",
    passes_cannot_be_repeated: "out_of_memory_in_backward",
    missing_gradients_are_zeros: "unused_parameters_rest",
}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:More than one backward pass before step")
@pytest.mark.parametrize("old", OLD, ids=lambda old: old.__name__)
def test_is_noticed(old: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    script = next(script for script in all_scripts() if script.name == OLD[old])
    old(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, TorchmnError)):
        check_exact(script, on_ranks(script, 2, "every_step"))


@pytest.mark.parametrize("name", OLD.values())
def test_and_is_right_today(name: str) -> None:
    script = next(script for script in all_scripts() if script.name == name)
    check_exact(script, on_ranks(script, 2, "every_step"))
