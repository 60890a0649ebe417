"""Wrong ways to save, load and reshard; each has the recipe of a run that shows it."""

from __future__ import annotations

from functools import partial

from tests.contracts.suites.resume_contracts import Recipe
from torchmn.comm.codecs import ErrorFeedback, Quantized
from torchmn.exchange.optimizer import resume
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules import DoubleBuffering, PeriodicAverage, Warmup

# ---- other bits on the same number of ranks ----


class ForgetsItsResiduals(ErrorFeedback):
    """Saves no residuals."""

    def new_instance(self):
        return ForgetsItsResiduals(self.codec.new_instance())

    def state_dict(self):
        return {**super().state_dict(), "residuals": []}


class DropsItsPendingMean(DoubleBuffering):
    """Begins again without the pending mean."""

    def load_state_dict(self, state):
        super().load_state_dict({})


def forgets_the_unit(monkeypatch):
    """Negotiates the unit of weights again, so that residuals have another scale than before."""
    load = GradientReducer.load_state_dict

    def forgetful(self, codec, progress) -> None:
        load(self, codec, progress)
        self.exchange.forget_scale()

    monkeypatch.setattr(GradientReducer, "load_state_dict", forgetful)
    return Recipe(codec="1bit")


def forgets_local_passes(monkeypatch):
    """Saves no gradients of passes under no_sync()."""
    monkeypatch.setattr(resume, "_load_accumulated", lambda reducer, state: None)
    return Recipe(num_passes=2)


class LosesUpdatesDuringTheExchange(PeriodicAverage):
    """What was learned since the exchange began is not in the state."""

    def state_dict(self):
        state = super().state_dict()
        for fragment in state["fragments"]:
            if fragment["exchange"]:
                fragment["exchange"]["starts"] = None
        return state


class EndsBlocksLater(PeriodicAverage):
    """Counts the samples of a block from the beginning when it is loaded."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._order.restart()


class WarmsUpAgain(Warmup):
    """Begins with the warm-up, whether it was over or not."""

    def load_state_dict(self, state):
        super().load_state_dict({})


class IsNotTheSameAfterSaving(DoubleBuffering):
    """Saving applies the pending mean."""

    def state_dict(self):
        self.flush()
        return super().state_dict()


# ---- something lost or added on another number of ranks ----


class RepeatsResidualsOnEachRank(ErrorFeedback):
    """Every new rank loads the whole residual, so that it is applied once by each."""

    def load_state_dict(self, state):
        entries = [{**e, "values": e["values"] * 3} for e in state.get("residuals", [])]
        super().load_state_dict({**state, "residuals": entries})

    def new_instance(self):
        return RepeatsResidualsOnEachRank(self.codec.new_instance())


class TakesTheFirstRanksBlock(PeriodicAverage):
    """What the others have learned in the block is discarded."""

    def reshard_state_dict(self, states, comm):
        return super().reshard_state_dict([states[0]] * len(states), comm)


class LeavesParametersAlone(PeriodicAverage):
    """Every new rank continues with old rank 0's parameters, but all weights are right."""

    def load_state_dict(self, state):
        fragments = [{**f, "parameters": {}} for f in state.get("fragments", [])]
        super().load_state_dict({**state, "fragments": fragments} if state else state)


class BeginsAnEmptyBlock(PeriodicAverage):
    """The samples of the block so far are no longer counted."""

    def reshard_state_dict(self, states, comm):
        state = super().reshard_state_dict(states, comm)
        return {**state, "fragments": [{**f, "num_samples": 0.0} for f in state["fragments"]]}


class LosesThePendingMean(DoubleBuffering):
    """It is restored on the same number of ranks only."""

    def reshard_state_dict(self, states, comm):
        return {}


def gives_each_rank_its_own_gradients(monkeypatch):
    """All ranks load the accumulated gradients of old rank 0."""
    monkeypatch.setattr(resume, "_shared_out", lambda accumulated, *_: accumulated[0])
    return Recipe(has_noise=False, num_passes=3, num_samples=48)


class WritesIntoOldStates(DoubleBuffering):
    """Modifies the states that it reads."""

    def reshard_state_dict(self, states, comm):
        for mean in states[0]["pending"].values():
            mean.mul_(2)
        return states[0]


def late(make, **options):
    return Recipe(schedule=lambda _: make(), **options)


def in_blocks(make, *arguments, **options):
    return Recipe(num_samples=48, schedule=lambda _: make(*arguments), **options)


INEXACT = {
    ForgetsItsResiduals: Recipe(codec=ForgetsItsResiduals(Quantized(bits=1))),
    DropsItsPendingMean: late(DropsItsPendingMean),
    forgets_the_unit: None,
    forgets_local_passes: None,
    LosesUpdatesDuringTheExchange: in_blocks(
        partial(LosesUpdatesDuringTheExchange, 24, overlap_steps=2)
    ),
    EndsBlocksLater: in_blocks(EndsBlocksLater, 36),
    WarmsUpAgain: in_blocks(lambda: WarmsUpAgain(24, PeriodicAverage(36))),
    IsNotTheSameAfterSaving: late(IsNotTheSameAfterSaving),
}
"""With the recipe of a run that shows it; a function returns it."""
LOSING = {
    RepeatsResidualsOnEachRank: Recipe(codec=RepeatsResidualsOnEachRank(Quantized(bits=1))),
    TakesTheFirstRanksBlock: in_blocks(TakesTheFirstRanksBlock, 48, has_noise=False),
    LeavesParametersAlone: in_blocks(LeavesParametersAlone, 48, has_noise=False),
    BeginsAnEmptyBlock: in_blocks(BeginsAnEmptyBlock, 48, has_noise=False),
    LosesThePendingMean: late(LosesThePendingMean, has_noise=False),
    gives_each_rank_its_own_gradients: None,
    WritesIntoOldStates: late(WritesIntoOldStates),
}
