"""CNTK's names: its two distributed learners, as multi-node optimizers.

Gradients are means over samples, where CNTK's were sums; ``docs/coming-from-cntk.md`` explains how
to convert learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.errors import UsageError
from torchmn.exchange.optimizer.create import create_multi_node_optimizer
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.exchange.schedules.warmup import Warmup

CODEC_OF_BITS = {32: "float32", 16: "float16", 8: "int8", 4: "int4", 2: "int2", 1: "1bit"}


def data_parallel_distributed_learner(
    optimizer: Optimizer,
    distributed_after: float = 0,
    num_quantization_bits: int = 32,
    *,
    comm: Communicator,
    model: nn.Module | Sequence[nn.Module],
) -> MultiNodeOptimizer:
    """Gradients are averaged at every step, weighted by samples, in few bits. *Collective.*

    Args:
        optimizer: any `torch.optim.Optimizer`.
        distributed_after: samples over all ranks until which gradients are sent in float32.
        num_quantization_bits: 32, 16, 8, 4, 2 or 1; below 16 with error feedback.
        comm: the ranks, and the route between them.
        model: the module, or modules, that own the optimizer's parameters.

    Raises UsageError: another number of bits.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.exchange.optimizer.data_parallel_distributed_learner(
        ...     sgd, num_quantization_bits=1, comm=comm, model=model
        ... )
    """
    raise_if_unknown_bits(num_quantization_bits)
    return create_multi_node_optimizer(
        optimizer,
        comm,
        model,
        codec=CODEC_OF_BITS[num_quantization_bits],
        schedule=_after(distributed_after, EveryStep()),
        weight="samples",
    )


def block_momentum_distributed_learner(
    optimizer: Optimizer,
    block_size: float,
    block_momentum_as_time_constant: float | None = None,
    use_nestrov_momentum: bool = True,  # CNTK's spelling
    reset_sgd_momentum_after_aggregation: bool = True,
    block_learning_rate: float = 1.0,
    distributed_after: float = 0,
    *,
    comm: Communicator,
    model: nn.Module | Sequence[nn.Module],
) -> MultiNodeOptimizer:
    """Ranks train alone for a block; the blocks' changes are smoothed. *Collective.*

    The same as ``schedule=BlockMomentum(...)``; see there for the arguments. ``block_size``,
    the time constant and ``distributed_after`` are in samples over all ranks.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.exchange.optimizer.block_momentum_distributed_learner(
        ...     sgd, block_size=4096, comm=comm, model=model
        ... )
    """
    return create_multi_node_optimizer(
        optimizer,
        comm,
        model,
        schedule=_after(
            distributed_after,
            BlockMomentum(
                block_size,
                block_momentum_as_time_constant,
                use_nestrov_momentum,
                reset_sgd_momentum_after_aggregation,
                block_learning_rate,
            ),
        ),
        weight="samples",
    )


def raise_if_unknown_bits(num_quantization_bits: int) -> None:
    """Raise UsageError: no codec has this number of bits."""
    if num_quantization_bits not in CODEC_OF_BITS:
        raise UsageError(
            f"num_quantization_bits={num_quantization_bits!r} must be one of "
            f"{', '.join(map(str, CODEC_OF_BITS))}."
        )


def _after(num_samples: float, schedule: EveryStep | BlockMomentum) -> Schedule:
    return Warmup(num_samples, schedule) if num_samples else schedule
