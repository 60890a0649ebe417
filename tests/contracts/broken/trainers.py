"""Trainers that are wrong, by the contract that must catch each."""

from __future__ import annotations

import torchmn.cntk as C


class WeighsRanksEqually(C.Trainer):
    """The mean of the ranks' means, whatever their samples."""

    def _evaluate(self, arguments, device, criterion=None):
        loss, own = super()._evaluate(arguments, device, criterion)
        for optimizer in self.optimizers if loss is not None else ():
            own_contribution = optimizer.reducer.contribution
            own_contribution.set = lambda weight, n, c=own_contribution: type(c).set(c, n > 0, n)
        return loss, own


class TakesItsOwnSamples(C.Trainer):
    """Rate and momentum of the samples of one rank, with the mean gradient of all."""

    def _evaluate(self, arguments, device, criterion=None):
        loss, self._own = super()._evaluate(arguments, device, criterion)
        return loss, self._own

    def _step(self, optimizer, num_samples):
        return super()._step(optimizer, self._own.num_samples or num_samples)


class ReportsItsOwnLoss(C.Trainer):
    """The loss of this rank's samples."""

    def _evaluate(self, arguments, device, criterion=None):
        loss, self._own = super()._evaluate(arguments, device, criterion)
        return loss, self._own

    @property
    def previous_minibatch_loss_average(self):
        return float(self._own.loss) / max(1, self._own.num_samples)


class EndsWithItsOwnData(C.Trainer):
    """Returns whether this rank had data."""

    def train_minibatch(self, arguments, *args, **kwargs):
        super().train_minibatch(arguments, *args, **kwargs)
        return bool(arguments)


class TakesAllSamplesInBlocks(C.Trainer):
    """Rate and momentum of the global minibatch, where the rank steps with its own gradients."""

    def _step(self, optimizer, num_samples):
        total = optimizer.reducer.contribution.mean_samples * optimizer.communicator.size
        return super()._step(optimizer, round(total) if num_samples else 0)
