"""The weight of a rank's gradient in the mean: its number of samples, or a number that is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch import nn

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import UsageError
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.reducer import GradientReducer
from torchmn.nn.batch_norm import weigh_losses_by
from torchmn.nn.chain_list import MultiNodeChainList


class SampleWeights:
    """Counts the samples of a model's batches for its optimizer, if they are needed. Local.

    Args:
        models: the models that are trained; samples of the first one are counted.
        hooks: the hooks to which those for counting are added.
        reducer: the reducer of the gradients.
        has_own_steps: whether each rank steps with its own gradients.
        before_count: called before each forward pass whose samples are counted.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        hooks: ModelHooks,
        reducer: GradientReducer,
        *,
        has_own_steps: bool,
        before_count: Callable[..., None],
    ) -> None:
        self.are_counted = False
        self._models, self._hooks = models, hooks
        self._contribution, self._exchange = reducer.contribution, reducer.exchange
        self._local_passes = reducer.local_passes
        self._has_own_steps, self._before_count = has_own_steps, before_count
        self._is_closed = False

    def count(self) -> None:
        """Begin to count the samples that the first model sees; later calls do nothing."""
        if self.are_counted:
            return
        self.are_counted = True
        model = self._models[0]
        self._hooks.before_forward(model, self._before_count)
        self._hooks.before_forward(model, self._contribution.count)
        self._hooks.show_to_compiler(model)
        if isinstance(model, MultiNodeChainList):  # its forward_backward does not call it
            model.register_count(self._contribution.add)

    def set(self, weight: float, *, is_of_new_batch: bool = False) -> None:
        """See `MultiNodeOptimizer.set_weight`.

        ``is_of_new_batch``: whether earlier weights of this exchange are those of other batches.
        """
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a non-negative finite number.")
        if self._exchange.reduction == "sum" and weight not in (0, 1):
            raise UsageError(
                f"set_weight({weight}) with reduction='sum': gradients are added as they are. "
                "Multiply the loss, or use reduction='mean', which divides by the weights. "
                "(Weight 0 leaves this rank out.)"
            )
        own = self._contribution
        if not (is_of_new_batch or self._local_passes.exist):
            own.given_weights.clear()  # no pass had them
        own.given_weights.append(float(weight))
        own.set(float(weight), float(weight))
        self._weigh_losses()

    def follow_loaders(self) -> None:
        """Weight ranks by the sizes of their parts in steps with batches of `scatter_loader`.

        Batch normalization over ranks uses these weights too.
        """
        own = self._contribution
        own.follows_batches = True
        if own.loaders is not None:
            own.loaders.when_used(self, SampleWeights._loader_is_there)

    def close(self) -> None:
        """Stop, as the optimizer is closed."""
        self._is_closed = True
        self._before_count = _nothing  # the method belongs to the optimizer, which refers to this

    def _loader_is_there(self) -> None:
        if self._is_closed:
            return
        self.count()
        if not self._has_own_steps:
            self._exchange.forget_scale()  # samples are another unit than ranks
        self._weigh_losses()

    @not_compiled
    def _weigh_losses(self) -> None:
        """Let layers that communicate in backward use the weight, as soon as it is known."""
        if self._has_own_steps:
            return
        found = ref(self._contribution)  # weak, as layers outlive the optimizer

        def loss_weight() -> float | None:
            contribution = found()
            return None if contribution is None else contribution.loss_weight

        for model in self._models:
            weigh_losses_by(model, loss_weight)


def _nothing(*_: object) -> None:
    """Stands in for a function of an optimizer that is closed."""
