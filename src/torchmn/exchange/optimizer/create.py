"""The function `create_multi_node_optimizer`, with which a training script becomes parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import ref

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchmn.base.errors import UnsupportedError, UsageError, raise_if_unknown
from torchmn.base.names import (
    AUTO,
    CODEC_TRAITS,
    DOUBLE_BUFFERING,
    EVERY_STEP,
    FLOAT32,
    SCHEDULE_TRAITS,
    CodecName,
    ScheduleName,
)
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.data.divided_batches import divided_batches
from torchmn.exchange.auto.tuner import Autotuner, SearchSpace
from torchmn.exchange.bucket_set import Reduction
from torchmn.exchange.codec_state import own_codec, warn_if_it_encodes_nothing
from torchmn.exchange.finiteness import OnNonfinite
from torchmn.exchange.optimizer.model_checks import compare_random_numbers, find_chains
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer
from torchmn.exchange.optimizer.trained_objects import Trained, modules_of
from torchmn.exchange.options import Auto, GradientOptions, Weight
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.schedules.double_buffering import DoubleBuffering
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.exchange.schedules.local_updates.diloco import DiLoCo
from torchmn.exchange.schedules.local_updates.periodic_average import PeriodicAverage
from torchmn.exchange.schedules.parameter_server.schedule import ParameterServer

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    EVERY_STEP: EveryStep,
    DOUBLE_BUFFERING: DoubleBuffering,
    "periodic_average": PeriodicAverage,
    "block_momentum": BlockMomentum,
    "diloco": DiLoCo,
    "parameter_server": ParameterServer,
}
"""The schedules by name, with their defaults: blocks of 512 samples per rank, no overlap."""


def create_multi_node_optimizer(
    optimizer: Optimizer,
    comm: Communicator,
    model: Trained,
    *,
    double_buffering: bool = False,
    zero_fill: bool = False,
    codec: CodecName | Literal["auto"] | Codec | Auto | None = None,
    schedule: ScheduleName | Literal["auto"] | Schedule | Auto | None = None,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    on_nonfinite: OnNonfinite = "raise",
    max_grad_norm: float | None = None,
    gradient_as_bucket_view: bool = False,
    _kind: type[MultiNodeOptimizer] = MultiNodeOptimizer,
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that gradients are means over all ranks. *Collective.*

    Parameters and buffers of rank 0 are copied to all ranks, which a checksum verifies. No step is
    lost, unlike in ChainerMN. The learning rate is not changed.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        comm: the ranks over which means are taken, and the route between them. All of them hold the
            same parameters: if a model is sharded or split over ranks, pass the communicator of
            those that hold the same part of it, such as ``Grid(comm, data=-1, model=2).data``.
        model: the module, or a list or dict of modules, that own the optimizer's parameters; their
            names, buffers and forward passes (to count samples) are used. Tensors that no module
            owns may be given instead, or in addition: ``image``, ``[model, log_variances]``. Pass
            modules of `fully_shard` and `parallelize_module` as they are: each rank exchanges its
            own part of every parameter.
        double_buffering: the same as ``schedule="double_buffering"``.
        zero_fill: give a parameter that has no gradient on any rank one of zeros, as ChainerMN did
            by default. Otherwise it keeps ``grad = None``, as in one process, and the optimizer
            skips it. A missing gradient counts as zeros if other ranks have one. Under schedules in
            which ranks step with their own gradients, such as local updates, each fills its own.
        codec: the form in which gradients are sent: ``float32``, ``float16``, ``bfloat16``,
            ``int8``, ``int4``, ``int2``, ``1bit``, ``power_sgd`` or an object of
            `torchmn.comm.codecs`; default: the communicator's ``allreduce_grad_dtype``. ``auto``
            chooses by measurement; `Auto` says what it may choose.
        schedule: ``every_step``, ``double_buffering``, ``periodic_average``, ``block_momentum``,
            ``diloco``, ``parameter_server`` or an object of `torchmn.schedules`. ``auto`` chooses
            by measurement; schedules whose gradients are a step late are considered only with
            ``Auto(stale=True)``.
        weight: ``rank`` gives all ranks the same weight in the mean; ``samples`` weights them by
            the number of samples that the model's forward has seen; for other weights call
            `MultiNodeOptimizer.set_weight`. The default is ``rank``, except in steps with batches
            of a `torchmn.scatter_loader` over ``comm``, if gradients are means of single steps:
            there the weight is the size of this rank's part. The loader may be created before or
            after the optimizer.
        reduction: ``mean`` over ranks, for a loss that is a mean over the batch; ``sum``, for a
            loss that is a sum over it, like torch's losses with ``reduction="sum"``. N ranks then
            compute the same parameters as one. ``sum`` is refused under local updates and with
            ``weight``, where it would be meaningless.
        on_nonfinite: what `step` does, on all ranks, if a mean is not finite: ``raise``, ``warn``
            or ``ignore``. A GradScaler skips such a step by itself.
        max_grad_norm: clip the mean by its global norm before each step.
        gradient_as_bucket_view: every ``p.grad`` shares the memory of the exchange, like the option
            of this name of DistributedDataParallel. That saves a copy of all gradients per step,
            but a gradient that the script keeps over `zero_grad` is overwritten by the next pass.

    Raises:
        UnknownNameError, UsageError: a name or a parameter is not known.
        RankMismatchError: the ranks' models or optimizers differ.
        UnsupportedError: valid arguments are in an unsupported combination.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        >>> optimizer.zero_grad()
        >>> model(torch.ones(4, 3)).mean().backward()  # now p.grad is the mean over ranks
        >>> optimizer.step()
        >>> model.weight.grad.tolist()
        [[1.0, 1.0, 1.0]]
    """
    options = GradientOptions(
        weight=weight,
        reduction=reduction,
        on_nonfinite=on_nonfinite,
        max_grad_norm=max_grad_norm,
        zero_fill=zero_fill,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    if double_buffering and schedule not in (None, DOUBLE_BUFFERING):
        raise UnsupportedError(
            f"double_buffering=True and schedule={schedule!r} contradict each other. Give one."
        )
    name = _or_auto(schedule or (DOUBLE_BUFFERING if double_buffering else EVERY_STEP))
    coded: str | Codec | Auto | None = _or_auto(codec)
    if isinstance(name, str):
        raise_if_unknown("schedule", name, [AUTO, *SCHEDULES])
    if isinstance(name, Auto) or isinstance(coded, Auto):
        space = _search_space(name, coded, comm)
        name, coded = Autotuner(space), space.codecs[0]
    chosen = SCHEDULES[name]() if isinstance(name, str) else name
    if reduction == "sum" and chosen.traits.has_own_steps:
        raise UnsupportedError(
            f"reduction='sum' adds the ranks' gradients of one step, and under {chosen.name} each "
            "rank steps with its own. Let the loss be a mean over the batch, or use a schedule of "
            "single steps, such as 'every_step'."
        )
    if isinstance(optimizer, MultiNodeOptimizer):
        raise UsageError(
            f"{comm.rank_label}: the optimizer is a multi-node optimizer already. Pass the one "
            "inside it (optimizer.inner)."
        )
    # Refused before the optimizer is made, which puts hooks into the model and compares the ranks.
    models = modules_of(model, comm)
    if any(isinstance(each, DistributedDataParallel) for each in models):
        raise UnsupportedError(
            f"{comm.rank_label}: the model is a DistributedDataParallel, which exchanges its "
            "gradients by itself. Give the module inside it (model.module) and drop the wrapper, "
            "or stay with it and use torchmn.exchange.optimizer.ddp_hook."
        )
    chains = find_chains(models, comm, max_grad_norm)
    form = own_codec(coded, comm)
    is_counted = weight is None
    may_differ = is_counted and reduction == "mean" and chosen.traits.averages_gradients
    made = _kind(optimizer, comm, models, chosen, form, options)
    # A chain makes a backward pass for each micro-batch, of which only the last may be exchanged.
    for chain in chains:
        chain.register_no_sync(made.no_sync)
    if may_differ or (is_counted and chosen.traits.counts_samples):
        made.sample_weights.follow_loaders()
    if (seeds := compare_random_numbers(comm, models)) is not None:
        made.seeds = seeds
        divided_batches(comm).facts.append(ref(seeds))
    if codec is not None and not isinstance(chosen, Autotuner):
        warn_if_it_encodes_nothing(form, comm)
    comm.logger(__name__).debug(
        "optimizer: %s, %s", type(chosen).__name__, "float32" if form is None else form.name
    )
    return made


def _or_auto(value: Any) -> Any:
    """Return ``Auto()`` for the name ``auto``; any other value as it is."""
    return Auto() if isinstance(value, str) and value == AUTO else value


def _search_space(
    schedule: str | Schedule | Auto,
    codec: str | Codec | Auto | None,
    comm: Communicator,
) -> SearchSpace:
    """The schedules and codecs among which ``auto`` may choose.

    Raises UnsupportedError: an object is given, or a schedule without comparable steps; UsageError:
    `Auto` has an option about an argument that is not chosen by it.
    """
    if not isinstance(schedule, (str, Auto)) or not isinstance(codec, (str, Auto, type(None))):
        raise UnsupportedError(
            f"'auto' chooses among names, but schedule={schedule!r} and codec={codec!r} hold an "
            "object. Give the other one by name, or both as objects."
        )
    if comm.codec is not None:
        raise UnsupportedError(
            f"The communicator was made with allreduce_grad_dtype={comm.codec.name!r}, so there is "
            "nothing to choose. Remove allreduce_grad_dtype or 'auto'."
        )
    given = [each for each in (schedule, codec) if isinstance(each, Auto)]
    is_stale, is_lossy = any(each.stale for each in given), any(each.lossy for each in given)
    for is_allowed, what, chosen in (
        (is_stale, "stale", schedule),
        (is_lossy, "lossy", codec),
    ):
        if is_allowed and not isinstance(chosen, Auto):
            argument = "schedule" if what == "stale" else "codec"
            raise UsageError(
                f"Auto({what}=True) is about the {argument}, and {argument}={chosen!r} is given. "
                f"Pass it as {argument}=Auto({what}=True), or leave it out."
            )
    if isinstance(schedule, Auto):
        known = [name for name, traits in SCHEDULE_TRAITS.items() if traits.has_single_steps]
        schedules = known if is_stale else known[:1]
    elif SCHEDULE_TRAITS[schedule].has_single_steps:
        schedules = [schedule]
    else:
        raise UnsupportedError(
            f"codec='auto' compares single steps, and schedule={schedule!r} has none that are "
            "comparable. Give the codec."
        )
    if isinstance(codec, Auto):
        codecs = [
            name
            for name, traits in CODEC_TRAITS.items()
            if traits.is_automatic and (is_lossy or not traits.is_lossy)
        ]
    else:
        codecs = [codec or FLOAT32]
    return SearchSpace(
        schedules={name: SCHEDULES[name] for name in schedules},
        codecs=codecs,
    )
