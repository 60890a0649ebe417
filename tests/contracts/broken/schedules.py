"""Wrong schedules, by the contract that must catch each."""

from __future__ import annotations

from torchmn.exchange import DoubleBuffering, EveryStep


class SumsInsteadOfMean(EveryStep):
    """Forgets the division."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self._exchange.sets[0].buckets:
            for parameter in bucket.parameters:
                parameter.grad.mul_(self._exchange.comm.size)


class AppliesTwice(EveryStep):
    """Steps once more with the same gradient when it is flushed."""

    def flush(self):
        self._inner.step()


class IsEarly(EveryStep):
    """Declares that it is a step late, and is not."""

    name = "double_buffering"
    staleness_steps = 1


class IsTwoLate(DoubleBuffering):
    """Applies every mean one step later than declared."""

    def __init__(self):
        super().__init__()
        self._held = None

    def backward_ended(self):
        super().backward_ended()
        parameters = [p for b in self._exchange.sets[0].buckets for p in b.parameters]
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
        if self._exchange.comm.rank == 1:
            first = self._exchange.sets[0].buckets[0].parameters[0]
            first.grad.mul_(1 + 2.0**-50)


class LosesPendingInState(DoubleBuffering):
    """Saves nothing of the gradient under way."""

    def state_dict(self):
        super().state_dict()
        return {}


class ForgetsLocalPasses(EveryStep):
    """Throws away what was added under no_sync()."""

    def attach(self, exchange, inner):
        super().attach(exchange, inner)

        def forget(parameter):
            if not exchange.is_syncing:
                parameter.grad.zero_()

        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(forget)


class CountsTheAbsent(EveryStep):
    """Divides by all ranks, also by those that have left their loop."""

    def backward_ended(self):
        means = self._exchange.filling
        super().backward_ended()
        for bucket in means.buckets:
            for parameter in bucket.parameters:
                parameter.grad.mul_(means.num_active / self._exchange.comm.size)
