"""The ranks of a node as one worker, with the mean of their gradients at every step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import copy_state_from_rank
from torchmn.exchange.schedules.every_step import EveryStep


class IntraNodeAverage(EveryStep):
    """`EveryStep` among the ranks of a node, which therefore hold the same parameters."""

    def __init__(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """Create the communicator of the node, and attach to the reducer. *Collective.*"""
        super().__init__()
        comm = reducer.comm
        self.comm = comm.split(comm.inter_rank, comm.intra_rank)
        self.num_ranks = self.comm.size
        self.num_missed_steps = 0
        """Number of steps of the node since this rank left its loop."""
        self.has_left = False
        """Whether all ranks of the node have left their loops."""
        self.num_active = 1
        """Number of ranks of the node that had data in the last step."""
        self.attach(reducer, inner, models)

    def begin(self) -> None:
        """Reduce gradients within the node from now on. *Collective.*"""
        self._reducer.reconfigure(self.comm, None)

    def leave(self, parameters: Sequence[Tensor]) -> None:
        """Called when all ranks of the node have left their loops. *Collective.*

        If some have missed steps, parameters and optimizer state are copied from one that made all.
        """
        self.has_left = True
        missed = self.comm.allgather_obj(self.num_missed_steps)
        if any(missed):
            # There is one: the node went on as long as a rank was in its loop.
            source = missed.index(0)
            copy_state_from_rank(self.comm, list(parameters), self._inner, source)
        self.num_missed_steps, self.num_active = 0, self.comm.size

    def restart(self) -> None:
        """Prepare for the ranks of the node to enter their loops again. Local."""
        self.has_left, self.num_missed_steps = False, 0

    def close(self) -> None:
        """Close the communicator of the node."""
        self.comm.finalize()
