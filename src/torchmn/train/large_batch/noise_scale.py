"""The gradient noise scale: the batch above which more samples per step no longer pay off.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, *An Empirical Model of Large-Batch Training*,
2018, arXiv 1812.06162. With G the gradient of the whole data and Σ the covariance of the gradients
of single samples (section 2.2)

    B_simple = tr(Σ) / |G|²

samples is about the critical batch: far below it, twice the batch halves the steps; far above it,
their number hardly changes. It costs only the computation of two norms (appendix A.1): a gradient
of b samples has the expected square |G|² + tr(Σ) / b, so the ranks' own gradients and their mean
give two equations for the two unknowns.

Difference from the paper, whose batches are equal: with weights w of sum 1 and b samples on each
rank the sum of w |g|² has the expected value |G|² + a tr(Σ), with a = sum w / b, and |sum of w g|²
has |G|² + m tr(Σ), with m = sum w² / b. For equal batches these are the paper's equations.
"""

import math
from collections.abc import Mapping

from torchmn.base.errors import UnsupportedError, UsageError, raise_if_no_count
from torchmn.base.warn import warn
from torchmn.cluster.units import counted
from torchmn.comm.codecs.half_precision import ReducedPrecision
from torchmn.exchange.gradient_norms import GradientNorms
from torchmn.exchange.optimizer.model_checks import find_chains
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules.double_buffering import DoubleBuffering
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.record import recording
from torchmn.record.records import NOISE_SCALE

_MIN_DIFFERENCE = 1e-6  # of a and m, relative to a: all weight on one rank leaves one equation


class GradientNoiseScale:
    """Measures the gradient noise scale of a training. All ranks must make one.

    ```python
    noise = torchmn.train.large_batch.GradientNoiseScale(optimizer)
    ...  # train as ever
    print(noise.value())  # samples: a batch above this will not pay
    ```

    Training stays bit-identical. Gradients are measured before clipping, in every ``every``-th
    step; ``tr(Σ)`` and ``|G|²`` are averaged over measurements and then divided. If the run is
    recorded, `torchmn report` shows the result. Samples are counted in the arguments of the model's
    forward (see `torchmn.data.batch_size.num_samples`), or given to ``optimizer.set_weight``.

    A step is not measured if its gradients are not finite, come from one rank alone, or add to the
    means of an earlier exchange (more than one backward pass outside of ``no_sync()``,
    ``zero_grad(set_to_none=False)``). On a single rank nothing is measured, with a warning.

    Args:
        optimizer: made by `create_multi_node_optimizer`.
        every: measure in every ``every``-th step.
        decay: decay of the averages from one measurement to the next, from 0 to below 1.

    Raises:
        UsageError: an argument is out of range, the optimizer is measured already, or its schedule,
            codec or reduction keeps gradients or their mean from being known.
        UnsupportedError: the model is sharded or divided among ranks, or has sparse gradients.

    Example:
        >>> def train(comm):
        ...     model = torch.nn.Linear(3, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        ...     noise = torchmn.train.large_batch.GradientNoiseScale(optimizer, every=1)
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.rand(8, 3)).square().mean().backward()
        ...         optimizer.step()
        ...     return noise.value() is not None
        >>> torchmn.testing.run_ranks(train, 2)
        [True, True]
    """

    def __init__(
        self, optimizer: MultiNodeOptimizer, *, every: int = 10, decay: float = 0.95
    ) -> None:
        raise_if_no_count("every", every, "a whole number of steps")
        if not 0 <= decay < 1:
            raise UsageError(f"decay={decay} must be at least 0 and less than 1.")
        _raise_if_unknowable(optimizer)
        if optimizer.communicator.size == 1:
            warn(
                "The gradient noise scale is not measured on one rank alone: it is found from the "
                "difference between ranks. Start at least two.",
            )
        self.every = every
        self.decay = decay
        self.num_measurements = 0
        self._reducer = optimizer.reducer
        self._square = 0.0
        """Moving average of |G|²."""
        self._variance = 0.0
        """Moving average of tr(Σ)."""
        _measure_norms(optimizer, self)

    def value(self) -> float | None:
        """The gradient noise scale in samples. Local; the same on all ranks.

        None before the first measurement; infinite where the mean gradient is too small to be
        distinguished from noise: let more steps be measured, or let ``decay`` be closer to 1.
        """
        if not self.num_measurements:
            return None
        if self._square <= 0:
            return math.inf
        return max(0.0, self._variance / self._square)

    def __repr__(self) -> str:
        value = self.value()
        size = "unknown" if value is None else f"{value:,.0f} samples"
        return f"GradientNoiseScale({size}, {counted(self.num_measurements, 'measurement')})"

    def state_dict(self) -> dict[str, float]:
        """The averages, the same on all ranks."""
        return {
            "square": self._square,
            "variance": self._variance,
            "num_measurements": self.num_measurements,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from a `state_dict`, saved on any number of ranks."""
        self._square, self._variance = state["square"], state["variance"]
        self.num_measurements = int(state["num_measurements"])

    def wants(self, step: int) -> bool:
        """See `NormListener.wants`. With ``auto`` the codec may change."""
        codec = self._reducer.codec
        return step % self.every == 0 and (codec is None or isinstance(codec, ReducedPrecision))

    def measured(self, norms: GradientNorms) -> None:
        """See `NormListener.measured`. Raises UsageError: the samples are not known."""
        if norms.num_samples == 0 and norms.own_square > 0:
            raise UsageError(
                "GradientNoiseScale needs the number of samples, which the arguments of the "
                "model's forward do not show. Call optimizer.set_weight(number_of_samples) before "
                "backward()."
            )
        estimates = estimate(norms)
        if estimates is None:
            return
        square, variance = estimates
        # Both averages begin at 0 and so are too small, by a factor that cancels in the quotient.
        self._square = self.decay * self._square + (1 - self.decay) * square
        self._variance = self.decay * self._variance + (1 - self.decay) * variance
        self.num_measurements += 1
        recorder, value = recording.current(), self.value()
        if recorder is not None and value is not None and math.isfinite(value):
            recorder.value(NOISE_SCALE, value, norms.step)


def estimate(norms: GradientNorms) -> tuple[float, float] | None:
    """Unbiased estimates of |G|² and tr(Σ) from one exchange; None if there are none."""
    a, m = norms.own_noise, norms.mean_noise
    if not math.isfinite(norms.own_square + norms.mean_square + a) or a - m <= _MIN_DIFFERENCE * a:
        return None
    square = (a * norms.mean_square - m * norms.own_square) / (a - m)
    return square, (norms.own_square - norms.mean_square) / (a - m)


def _raise_if_unknowable(optimizer: MultiNodeOptimizer) -> None:
    label, reducer = optimizer.communicator.rank_label, optimizer.reducer
    name, codec = optimizer.schedule.name, reducer.codec
    if optimizer.tuner is None and type(optimizer.schedule) not in (EveryStep, DoubleBuffering):
        raise UsageError(
            f"{label}: GradientNoiseScale with {name}: it compares the ranks' gradients with their "
            "mean, which this schedule does not hold whole after each backward pass. Measure in a "
            "short run with schedule='every_step'."
        )
    if optimizer.tuner is None and not (codec is None or isinstance(codec, ReducedPrecision)):
        raise UsageError(
            f"{label}: GradientNoiseScale with codec {codec.name}, whose error would be taken for "
            "noise. Measure in a short run without a codec, or with float16 or bfloat16."
        )
    if reducer.exchange.reduction == "sum":
        raise UsageError(
            f"{label}: GradientNoiseScale with reduction='sum': a sum grows with the batch. Let "
            "the loss be a mean over samples, with reduction='mean' and weight='samples'."
        )
    parameters = reducer.parameters
    if parameters.are_sharded or parameters.mesh.size > 1:
        raise UnsupportedError(
            f"{label}: GradientNoiseScale measures whole gradients, and the parameters of this "
            "model are divided among ranks. Measure with a smaller model that is whole on each."
        )
    if parameters.sparse:
        raise UnsupportedError(
            f"{label}: GradientNoiseScale measures dense gradients, and that of "
            f"'{parameters.sparse[0][0]}' is sparse. Make its layer with sparse=False to measure."
        )


def _measure_norms(optimizer: MultiNodeOptimizer, listener: GradientNoiseScale) -> None:
    """Give a listener the norms of gradients, and count samples for it. Local.

    Raises UsageError: there is one already; UnsupportedError: the model is a chain over ranks.
    """
    comm, exchange = optimizer.communicator, optimizer.reducer.exchange
    if find_chains(optimizer._models, comm, None):
        raise UnsupportedError(
            f"{comm.rank_label}: the norm of a gradient is that of all parameters, and the modules "
            "of this chain are on several ranks. Measure with a model that is whole on each rank."
        )
    if exchange.norm_listener is not None:
        raise UsageError(
            "The norms of this optimizer's gradients are measured already. Use the "
            f"{type(exchange.norm_listener).__name__} that was made first."
        )
    exchange.norm_listener = listener
    optimizer.sample_weights.count()
