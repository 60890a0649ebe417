"""Defects of earlier versions, put back: the user scripts detect each of them.

That they pass without is shown by ``test_as_one_process``, under the same schedules on two ranks.
"""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from torchmn.base.names import SCHEDULE_TRAITS, ScheduleTraits
from torchmn.errors import TorchmnError
from torchmn.exchange.buckets import Slot
from torchmn.exchange.exchanged_parameters import ExchangedParameters
from torchmn.exchange.gradient_exchange import GradientExchange
from torchmn.exchange.means import Means
from torchmn.exchange.optimizer import multi_node_optimizer, unusual_steps
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.weights import Contribution

from .running import check_exact, on_ranks
from .suite import all_scripts

Patch = Callable[[pytest.MonkeyPatch], None]


def gradients_are_slots(patch: pytest.MonkeyPatch) -> None:
    always = property(lambda self: True, lambda self, value: None)
    patch.setattr(GradientExchange, "as_view", always, raising=False)


def slots_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    gradients_are_slots(patch)
    patch.setattr(Slot, "current_tensor", lambda self: self.tensor)


def earlier_owners_are_not_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(multi_node_optimizer, "owners_of", lambda parameters: [])


def layouts_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExchangedParameters, "have_changed", lambda self: False)


def passes_cannot_be_repeated(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: GradientReducer) -> None:
        raise RuntimeError("the backward pass before this did not reach its end")

    patch.setattr(GradientReducer, "_give_up_pass", give_up)


def missing_gradients_are_zeros(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Means, "clear_absent", lambda self: None)


def recomputed_forwards_count(patch: pytest.MonkeyPatch) -> None:
    def count(
        self: Contribution, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        self._counted += args[0].shape[0]
        self.was_ever_known = self._has_counted = True

    patch.setattr(Contribution, "count", count)


def losses_of_closures_are_unweighted(patch: pytest.MonkeyPatch) -> None:
    def plain_mean(loss: Tensor, reducer: GradientReducer) -> Tensor:
        return reducer.comm.allreduce(loss.detach(), "mean")

    patch.setattr(unusual_steps, "_loss_over_ranks", plain_mean)


def auto_may_choose_any_schedule(patch: pytest.MonkeyPatch) -> None:
    """As if it had measured that the one which this script cannot work with is the best."""
    patch.setitem(SCHEDULE_TRAITS, "every_step", ScheduleTraits())


OLD: dict[Patch, str] = {
    gradients_are_slots: "pcgrad",
    slots_are_not_looked_at: "replace_data_of_gradients",
    earlier_owners_are_not_found: "cell_run_twice",
    layouts_stay: "frozen_then_unfrozen",
    passes_cannot_be_repeated: "out_of_memory_in_backward",
    missing_gradients_are_zeros: "unused_parameters_rest",
    recomputed_forwards_count: "checkpointing_weighted_by_samples",
    losses_of_closures_are_unweighted: "lbfgs_weighted_by_samples",
    auto_may_choose_any_schedule: "clip_by_norm",
}


def _schedule_of(old: Patch) -> str:
    return "auto" if old is auto_may_choose_any_schedule else "every_step"


@pytest.mark.filterwarnings("ignore:More than one backward pass before step")
@pytest.mark.filterwarnings("ignore:(.|\n)*the parameters of the ranks differ")  # some do
@pytest.mark.parametrize("old", OLD, ids=lambda old: old.__name__)
def test_is_noticed(old: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    script = next(script for script in all_scripts() if script.name == OLD[old])
    old(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, TorchmnError)):
        check_exact(script, on_ranks(script, 2, _schedule_of(old)))
