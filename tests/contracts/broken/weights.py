"""Wrong in how they take weights and parts of blocks, by the contract that must catch each."""

from __future__ import annotations

from tests.contracts.broken.codecs import Base
from torchmn.comm.codecs import PowerSGD
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, EveryStep


class KeepsResidualsOfSums(Base):
    """Adds the residual of one sum to the next one, whatever part of its mean that is.

    This was the rule before residuals had a scale: wrong with unequal weights, 16 times too much
    one step into a block of 16, W times too much where one of W ranks continues.
    """

    def begin(self, total_scale):
        pass


class FactorsResidualsOfSums(PowerSGD):
    """The same of matrices."""

    def begin(self, total_scale):
        pass

    def new_instance(self):
        return type(self)()


class KeepsAnOldUnit(EveryStep):
    """A rank that has left its loop counts weights in the unit of when it left."""

    def step(self, closure):
        if self._reducer.is_active:
            return super().step(closure)
        adopt = self._exchange.adopt_scale
        self._exchange.adopt_scale = lambda means: None
        try:
            return super().step(closure)
        finally:
            self._exchange.adopt_scale = adopt


class WeighsRanksEqually(EveryStep):
    """Whatever their weights."""

    def attach(self, reducer, inner, models):
        super().attach(reducer, inner, models)
        begin = reducer._begin_exchange

        def begin_with_equal_weights():
            reducer.contribution.set(1.0, 1.0)
            begin()

        reducer._begin_exchange = begin_with_equal_weights


class AppliesFullMomentum(BlockMomentum):
    """Takes a part of a block for a small block of its own: its momentum is that of a full one."""

    def __init__(self):
        super().__init__(36)

    def partial_outer_step(self, pseudo_gradients, part):
        self.outer_step(pseudo_gradients, part * self.full_block_size)


class TakesAFullOuterStep(DiLoCo):
    """Lets the outer optimizer step as far as at the end of a full block."""

    def __init__(self):
        super().__init__(36)

    def partial_outer_step(self, pseudo_gradients, part):
        self.outer_step(pseudo_gradients, part * self.full_block_size)
