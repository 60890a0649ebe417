"""Wrong schedules, by the contract that must catch each."""

from __future__ import annotations

from torchmn.exchange.schedules import (
    BlockMomentum,
    DoubleBuffering,
    EveryStep,
    PeriodicAverage,
    Warmup,
)


class SumsInsteadOfMean(EveryStep):
    """Forgets the division."""

    def backward_ended(self):
        super().backward_ended()
        for slot in self._reducer.exchange.sets[0].slots:
            slot.parameter.grad.mul_(self._reducer.comm.size)


class AppliesTwice(EveryStep):
    """Steps once more with the same gradient when it is flushed."""

    def flush(self):
        self._inner.step()


class IsEarly(EveryStep):
    """Declares that it is a step late, and is not."""

    traits = DoubleBuffering.traits


class IsTwoLate(DoubleBuffering):
    """Applies every mean one step later than declared."""

    def __init__(self):
        super().__init__()
        self._held = None

    def backward_ended(self):
        super().backward_ended()
        parameters = [slot.parameter for slot in self._reducer.exchange.sets[0].slots]
        fresh = [p.grad.clone() for p in parameters] if self._has_mean else None
        self._has_mean = self._held is not None
        for position, parameter in enumerate(parameters):
            parameter.grad = self._held[position] if self._held is not None else None
        self._held = fresh


class LosesTheLast(DoubleBuffering):
    """Does not apply what is pending when it is flushed."""

    def flush(self):
        if self._pending is not None:
            self._pending.wait()
        self._pending = None


class DriftsApart(EveryStep):
    """Rank 1 rounds otherwise."""

    def backward_ended(self):
        super().backward_ended()
        if self._reducer.comm.rank == 1:
            first = self._reducer.exchange.sets[0].slots[0].parameter
            first.grad.mul_(1 + 2.0**-50)


class LosesPendingInState(DoubleBuffering):
    """Saves nothing of the pending gradient."""

    def state_dict(self):
        super().state_dict()
        return {}


class _Forgetful:
    """Discards what was added under no_sync()."""

    def attach(self, reducer, inner, models):
        super().attach(reducer, inner, models)

        def forget(parameter):
            if reducer.local_passes.are_on:
                parameter.grad.zero_()

        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(forget)


class ForgetsLocalPasses(_Forgetful, EveryStep):
    """Exchanges the gradient of the last backward pass only."""


class CountsFinishedRanks(EveryStep):
    """Divides by all ranks, also by those that have left their loop."""

    def backward_ended(self):
        super().backward_ended()
        for slot in self._reducer.exchange.sets[0].slots:
            slot.parameter.grad.mul_(self._exchange.num_active / self._exchange.comm.size)


class KeepsNoResidual(EveryStep):
    """Discards the residual at every step."""

    def backward_ended(self):
        super().backward_ended()
        self._reducer.codec.load_state_dict({})


class AddsNoise(EveryStep):
    """Never gives a gradient of zero."""

    def backward_ended(self):
        super().backward_ended()
        for slot in self._reducer.exchange.sets[0].slots:
            slot.parameter.grad.add_(1e-9)


class HidesWhatIsNotFinite(EveryStep):
    """Takes NaN and infinity for zeros and continues."""

    def backward_ended(self):
        super().backward_ended()
        self._reducer.exchange.nonfinite.take()
        for slot in self._reducer.exchange.sets[0].slots:
            slot.parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


class RunsOnOldParameters(EveryStep):
    """Applies a step when the next backward pass has ended."""

    def attach(self, reducer, inner, models):
        super().attach(reducer, inner, models)
        self._held = []

    def backward_ended(self):
        self.flush()
        super().backward_ended()

    def step(self, closure):
        if not self._reducer.is_active:
            super().step(closure)
            return
        self._reducer.exchange_if_late()
        self._exchange.num_in_step = 0
        parameters = [p for group in self._inner.param_groups for p in group["params"]]
        self._held = [(p, p.grad.clone()) for p in parameters]

    def flush(self):
        held, self._held = self._held, []
        if held:
            fresh = [p.grad for p, _ in held]
            for p, grad in held:
                p.grad = grad
            self._inner.step()
            for (p, _), grad in zip(held, fresh, strict=True):
                p.grad = grad


class LooksUpOptionsLater(RunsOnOldParameters):
    """Applies a step with the options that hold when it does so: too late."""


class SmallBlocks(PeriodicAverage):
    """The base of the broken ones: blocks of three steps of 4 samples on 3 ranks."""

    def __init__(self):
        super().__init__(36)


class WeighsRanksEqually(SmallBlocks):
    """Whatever their batches."""

    def _count_samples(self, num_samples, mean_samples=None):
        super()._count_samples(4)


class SubtractsWhatItShouldAdd(SmallBlocks):
    """Moves away from the ranks' parameters."""

    def outer_step(self, pseudo_gradients, num_samples):
        for each in pseudo_gradients:
            each.anchor.add_(each.mean)


class AnchorsDriftApart(SmallBlocks):
    """Rank 1 rounds otherwise."""

    def outer_step(self, pseudo_gradients, num_samples):
        super().outer_step(pseudo_gradients, num_samples)
        if self._comm.rank == 1:
            pseudo_gradients[0].anchor.mul_(1 + 2.0**-50)


class KeepsLocalParameters(SmallBlocks):
    """Averages anchors, and continues with the local parameters."""

    def _finish_exchange(self):
        held = [p.detach().clone() for f in self._fragments for p in f.parameters]
        super()._finish_exchange()
        for parameter, value in zip(
            (p for f in self._fragments for p in f.parameters), held, strict=True
        ):
            parameter.data.copy_(value)


class LosesBlockMomentumInState(BlockMomentum):
    """Saves anchors, but not what is smoothed over blocks."""

    def __init__(self):
        super().__init__(36)

    def outer_state_dict(self):
        return {}


class LosesTheBlockInState(SmallBlocks):
    """A block that was half full when it was saved is empty when it is loaded."""

    def load_state_dict(self, state):
        if state:
            order = {**state["order"], "samples": 0.0}
            fragments = [{**f, "num_samples": 0.0} for f in state["fragments"]]
            state = {**state, "order": order, "fragments": fragments}
        super().load_state_dict(state)


class ForgetsLocalPassesOfBlocks(_Forgetful, SmallBlocks):
    """Steps with the gradient of the last backward pass only."""


class LosesUpdatesOfFinishedRanks(SmallBlocks):
    """A rank that has left its loop contributes nothing to the next block."""

    def step(self, closure):
        if not self._reducer.is_active:
            for fragment in self._fragments:
                fragment.num_samples = 0.0
        return super().step(closure)


class ContinuesWithNaN(SmallBlocks):
    """Ignores movements that are not finite."""

    def _discard_block(self, fragment):
        self._reducer.exchange.nonfinite.take()
        fragment.reset_to_anchors()


class KeepsNoBlockResidual(SmallBlocks):
    """Discards the residual after every block."""

    def _finish_exchange(self):
        super()._finish_exchange()
        for fragment in self._fragments:
            if fragment.codec is not None:
                fragment.codec.load_state_dict({})


class MovesByNoise(SmallBlocks):
    """Even where no rank has moved."""

    def outer_step(self, pseudo_gradients, num_samples):
        super().outer_step(pseudo_gradients, num_samples)
        for each in pseudo_gradients:
            each.anchor.add_(1e-9)


class EndsTheWarmupLater(Warmup):
    """One step later, for 4 samples per step on 3 ranks."""

    def __init__(self):
        super().__init__(24, PeriodicAverage(36))

    def _end_if_due(self):
        return self.num_samples > self.warmup_samples and super()._end_if_due()


class EndsSomewhereElse(Warmup):
    """Rank 1 does not continue where the others do."""

    def __init__(self):
        super().__init__(24, PeriodicAverage(36))

    def flush(self):
        super().flush()
        if self._comm.rank == 1:
            self._inner.param_groups[0]["params"][0].data.mul_(1 + 2.0**-50)
