"""Double buffering: step k applies mean(g_{k-1}) while the sum of g_k is under way.

    backward k:  start the sum of g_k;  p.grad <- mean(g_{k-1})
    step k:      w_{k+1} = w_k - update(mean(g_{k-1}))        (k >= 2; the first step does nothing)
    flush:       w = w - update(mean(g_N))

Source: ChainerMN's `_DoubleBufferingOptimizer`, CNTK's ``useBufferedAsyncGradientAggregation``.
Staleness is exactly one step. Differences: no iteration is spent on a broadcast, so that N
iterations give N-1 steps instead of N-2; `flush()` applies the last gradient; the pending gradient
is saved.

``eager=True`` computes g_k where the late mean will lead, by a step with the rank's own gradient
(see `eager_step`):

    step k:      w_{k+1} = w_k - update(mean(g_{k-1}));  note c = update(own g_k)
    pass k+1:    g_{k+1} is computed at w_{k+1} - c;  after it the parameters are w_{k+1} again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torchmn.base.errors import RankMismatchError, UnsupportedError
from torchmn.base.names import DOUBLE_BUFFERING
from torchmn.comm import Communicator
from torchmn.exchange.agreements.facts import LateRanks
from torchmn.exchange.gradient_exchange import CHANGED_AND_LATE
from torchmn.exchange.gradient_memory import GradientState
from torchmn.exchange.means import Means
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.eager_step import EagerStep, LateMeans
from torchmn.exchange.sums import Sums


class DoubleBuffering(Schedule):
    """Gradients are applied one step late, and their exchange overlaps with a whole step.

    Args:
        eager: compute each gradient after a trial step with the rank's own previous gradient. With
            ``codec="int8"`` a short training run then ends 0.6 points of accuracy below
            `EveryStep`, instead of 2.2 (``docs/explain/recipes.md``). It costs a second step of the
            optimizer and copies of gradients, parameters and the optimizer's state. The trial step
            is in the parameters from a call of the model, with gradients enabled, to the end of
            `backward`; at any other time all ranks hold the same parameters. Call the model that
            was passed to `create_multi_node_optimizer`, not parts of it. Hooks of the optimizer see
            steps with means only. Not supported if ranks hold parts of parameters.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = DoubleBuffering.recommended()
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
        >>> optimizer.flush()  # at the end: the last gradient
    """

    traits = Traits(name=DOUBLE_BUFFERING, num_sets=2, staleness_steps=1)

    def __init__(self, *, eager: bool = False) -> None:
        self.eager = eager
        self._pending: Sums | None = None
        self._has_mean = False
        """Whether ``p.grad`` holds a mean that the next step applies."""
        self._late: LateMeans
        self._own: dict[Tensor, Tensor] = {}
        """This rank's own gradients of the last backward pass, if eager."""
        self._assigned: list[GradientState] = []
        """The state of the gradients when `backward` returned; empty if it assigned no means."""
        self._was_changed = False
        """Whether the script changed those gradients before the last step."""

    @classmethod
    def recommended(cls) -> DoubleBuffering:
        """The settings with the least measured loss of accuracy: ``eager=True``."""
        return cls(eager=True)

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`.

        Raises UnsupportedError: ``eager`` with a model of which ranks hold parts, or LBFGS.
        """
        if isinstance(inner, LBFGS):
            raise UnsupportedError(
                f"{reducer.comm.rank_label}: double_buffering does not support LBFGS, whose step "
                "needs gradients at the parameters that it tries, not those of a step before. Use "
                "schedule='every_step'."
            )
        super().attach(reducer, inner, models)
        exchange = self._exchange
        self._late = LateMeans(inner)
        # The number of ranks whose gradients are added without being divided.
        self._num_added = reducer.comm.size if exchange.reduction == "sum" else 1
        if self.eager:
            parameters, rank_label = reducer.parameters, self._comm.rank_label
            if parameters.are_sharded or parameters.mesh.has_parallel_layers:
                raise UnsupportedError(
                    f"{rank_label}: DoubleBuffering(eager=True) compares norms of whole gradients "
                    "on each rank, and of this model ranks hold parts. Use DoubleBuffering() or "
                    "'every_step'."
                )
            self._late = EagerStep(inner, parameters.trained, rank_label, models)
            exchange.keep_own_gradients()

    def before_access(self, access: Literal["read", "load"]) -> None:
        """See `Schedule.before_access`."""
        if access == "read":
            self._late.remove()

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        exchange = self._exchange
        if exchange.num_in_step:
            raise UnsupportedError(
                "Two backward passes before step() with double_buffering: the second would add to "
                "the mean of the step before. Wrap all passes but the last in optimizer.no_sync()."
            )
        own = exchange.take_own_gradients()
        context = exchange.filled.context
        self._own = own if context.weight else {}
        # Started before the older means are waited for, which may still be under way: the next sums
        # follow them without a pause, in the same order on all ranks.
        before, self._pending = self._pending, exchange.start()
        self._has_mean = before is not None
        if before is None:
            exchange.clear()
        else:
            self._assign(before)
            self._assigned = exchange.gradient_states()
        self._late.pass_ended()  # last, as it may raise

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if not self._reducer.is_active:
            self._step_without_data()
            return None
        exchange = self._exchange
        loss = closure() if closure is not None else None
        self._was_changed = bool(self._assigned) and self._assigned != exchange.gradient_states()
        if exchange.num_in_step == 0:
            self._reducer.exchange_now(is_late=True)
        elif self._local_passes.exist:
            raise UnsupportedError(
                "A backward pass under no_sync() came after the one that was exchanged, before "
                "step(). With double_buffering the pass outside no_sync() must be the last one."
            )
        exchange.num_in_step = 0
        self._assigned = []
        has_mean, self._has_mean = self._has_mean, False
        own, self._own = self._own, {}
        if has_mean:  # an own part of a sum is as many times smaller
            self._late.step(own, float(self._num_added))
        return loss

    def _step_without_data(self) -> None:
        """Take part in a step of the other ranks. *Collective.*"""
        self._late.forget()
        if self._pending is not None:
            self._pending.wait()
        self._reducer.finish_filling()
        sums = self._exchange.start()
        if self._pending is not None:
            self._exchange.discard(self._pending)
        sums.wait()
        # Bucket sets alternate, and all ranks must use the same one in an exchange. An exchange in
        # which no rank had data does not count: its set is filled again.
        if sums.num_active:
            self._pending = sums
        else:
            self._exchange.take_back(sums)
        self._exchange.num_active = sums.num_active

    def flush(self) -> None:
        """See `Schedule.flush`."""
        has_mean, self._has_mean = self._has_mean, False
        num_exchanges, self._exchange.num_in_step = self._exchange.num_in_step, 0
        self._late.forget()
        if has_mean and num_exchanges:  # there was a backward pass, but no step yet
            self._inner.step()
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._assign(pending)
        self._inner.step()

    def _assign(self, means: Sums) -> None:
        """Set every ``p.grad`` to its late mean.

        Raises RankMismatchError: in the step in which the exchange of these means began, the script
        changed this rank's gradients, and some other rank had none to change.
        """
        self._exchange.assign(means)
        if means.footer.get(LateRanks).are_some_late and self._was_changed:
            raise RankMismatchError(f"{self._comm.rank_label}: {CHANGED_AND_LATE}")

    def close(self) -> None:
        """See `Schedule.close`."""
        self._late.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`: the means that the next step will apply, by name.

        With ``eager`` also the change of a step with this rank's own gradient.
        """
        if self._pending is None:
            return {}
        self._pending.wait()
        return {
            "pending": Means(self._pending).copies(),
            "pending_record": self._pending.record(),
            **self._late.state_dict(),
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`: the eager step is left out, as a rank's part of a batch has changed."""
        return {key: value for key, value in states[0].items() if key != "ahead"}

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        if not self.eager:
            return []
        return [
            "With eager=True gradients are computed after a step with a rank's own gradient, which "
            "is that of fewer or more samples now: the run takes another path, as with another "
            "seed."
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Raises UsageError: other parameters than saved."""
        if self._pending is not None:
            self._pending.drain()  # its memory is used again
        self._pending, self._has_mean = None, False
        self._own = {}
        self._late.load_state_dict(state)
        if "pending" in state:
            self._pending = self._exchange.load_means(state["pending"], state.get("pending_record"))
