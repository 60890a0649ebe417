"""`create_multi_node_optimizer`: the one line that makes a training script parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from torchmn.communicators import Communicator
from torchmn.communicators.wire import create_wire
from torchmn.compression import StripeCodec, create_codec
from torchmn.compression.reduced_precision import ReducedPrecision
from torchmn.errors import UnknownNameError, UnsupportedError
from torchmn.exchange.base import Schedule
from torchmn.exchange.double_buffering import DoubleBuffering
from torchmn.exchange.every_step import EveryStep
from torchmn.exchange.optimizer import MultiNodeOptimizer, Weight

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "every_step": EveryStep,
    "double_buffering": DoubleBuffering,
}


def create_multi_node_optimizer(
    optimizer: Optimizer,
    comm: Communicator,
    model: nn.Module | Sequence[nn.Module],
    *,
    double_buffering: bool = False,
    zero_fill: bool = True,
    codec: str | StripeCodec | None = None,
    schedule: str | Schedule | None = None,
    weight: Weight = "rank",
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that gradients are means over all ranks. *Collective.*

    Parameters and buffers of rank 0 are given to all ranks, and a checksum proves it. No step is
    lost, unlike in ChainerMN. The learning rate is left alone.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        comm: who takes part, and by which route.
        model: the module, or modules, that own the optimizer's parameters: names, buffers.
        double_buffering: the same as ``schedule="double_buffering"``.
        zero_fill: a parameter without a gradient counts as zeros. If off, one that has no gradient
            on any rank keeps ``grad = None``.
        codec: ``float32``, ``float16`` or ``bfloat16`` on the wire; default: the communicator's
            ``allreduce_grad_dtype``.
        schedule: ``every_step`` or ``double_buffering``.
        weight: ``rank`` is the mean of the ranks' means; ``samples`` weights them by the number of
            samples that the model's forward has seen; `MultiNodeOptimizer.set_weight` by anything.

    Raises:
        UnknownNameError, UsageError: a name or a parameter is not known.
        DisagreementError: the ranks' models differ.
        UnsupportedError: a combination that makes no sense.
    """
    if weight not in ("rank", "samples"):
        raise UnknownNameError("weight", weight, ("rank", "samples"))
    if double_buffering and schedule not in (None, "double_buffering"):
        raise UnsupportedError(
            f"double_buffering=True and schedule={schedule!r} contradict each other. Give one."
        )
    name = (
        schedule
        if schedule is not None
        else ("double_buffering" if double_buffering else "every_step")
    )
    if isinstance(name, str):
        if name not in SCHEDULES:
            raise UnknownNameError("schedule", name, SCHEDULES)
        name = SCHEDULES[name]()
    models = [model] if isinstance(model, nn.Module) else list(model)
    wire = create_wire(_carried(create_codec(codec)) if codec is not None else comm.codec)
    return MultiNodeOptimizer(
        optimizer, comm, models, name, wire, zero_fill=zero_fill, weight=weight
    )


def _carried(codec: StripeCodec | None) -> StripeCodec | None:
    """The codec, if the wire can carry it. Raises UnsupportedError: not yet.

    The quantized codecs need the names of parameters beside each stripe, which the wire does not
    pass on so far.
    """
    if codec is None or isinstance(codec, ReducedPrecision):
        return codec
    raise UnsupportedError(
        f"codec={codec.name!r} can encode and decode, but gradients cannot travel in it yet. "
        "Use float16 or bfloat16."
    )
