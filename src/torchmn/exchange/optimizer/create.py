"""`create_multi_node_optimizer`: the one line that makes a training script parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.local_tensors import is_distributed
from torchmn.errors import UnknownNameError, UnsupportedError, UsageError
from torchmn.exchange.auto.tuner import Autotuner, SearchSpace
from torchmn.exchange.bucket_set import Reduction
from torchmn.exchange.codec_state import own_codec, warn_if_it_encodes_nothing
from torchmn.exchange.finiteness import OnNonfinite
from torchmn.exchange.optimizer.model_checks import compare_random_numbers, find_chains
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer, Weight
from torchmn.exchange.optimizer.trained_objects import Trained, modules_of
from torchmn.exchange.replicas import parameters_of
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.schedules.double_buffering import DoubleBuffering
from torchmn.exchange.schedules.every_step import EveryStep
from torchmn.exchange.schedules.local_updates.block_momentum import BlockMomentum
from torchmn.exchange.schedules.local_updates.diloco import DiLoCo
from torchmn.exchange.schedules.local_updates.periodic_average import PeriodicAverage
from torchmn.exchange.schedules.parameter_server.schedule import ParameterServer

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "every_step": EveryStep,
    "double_buffering": DoubleBuffering,
    "periodic_average": PeriodicAverage,
    "block_momentum": BlockMomentum,
    "diloco": DiLoCo,
    "parameter_server": ParameterServer,
}
"""Those by name have their defaults: blocks of 512 samples per rank, without overlap."""

SINGLE_STEPS = ["every_step", "double_buffering"]
"""The schedules that ``auto`` knows, the plainest first."""
LOSSY_CODECS = ["float16", "int8", "int4", "1bit"]


def create_multi_node_optimizer(
    optimizer: Optimizer,
    comm: Communicator,
    model: Trained,
    *,
    double_buffering: bool = False,
    zero_fill: bool = False,
    codec: str | Codec | None = None,
    schedule: str | Schedule | None = None,
    allow_lossy: bool = False,
    allow_stale: bool = False,
    retune: bool = False,
    weight: Weight | None = None,
    reduction: Reduction = "mean",
    on_nonfinite: OnNonfinite = "raise",
    max_grad_norm: float | None = None,
    gradient_as_bucket_view: bool = False,
    _kind: type[MultiNodeOptimizer] = MultiNodeOptimizer,
) -> MultiNodeOptimizer:
    """Wrap an optimizer so that gradients are means over all ranks. *Collective.*

    Parameters and buffers of rank 0 are given to all ranks, and a checksum proves it. No step is
    lost, unlike in ChainerMN. The learning rate is left alone.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        comm: the ranks, and the route between them. They hold the same parameters: where a model is
            sharded or split over ranks, the communicator of those that hold the same part of it, as
            ``Grid(comm, data=-1, model=2).data``. Means are over these ranks.
        model: the module, or a list or dict of modules, that own the optimizer's parameters: names,
            buffers, and forward passes, whose samples are counted. In place of a module, or beside
            modules, tensors that no module owns: ``image``, ``[model, log_variances]``. Modules of
            `fully_shard` and `parallelize_module` are given as they are: each rank exchanges its
            own part of every parameter.
        double_buffering: the same as ``schedule="double_buffering"``.
        zero_fill: give a parameter that has no gradient on any rank one of zeros, as ChainerMN did
            by default. Otherwise it keeps ``grad = None``, as in one process, and the optimizer
            leaves it alone. One that has a gradient on some ranks counts as zeros on the others.
            Where ranks step with their own gradients, as under local updates, each fills its own.
        codec: the form in which gradients are sent: ``float32``, ``float16``, ``bfloat16``,
            ``int8``, ``int4``, ``int2``, ``1bit``, ``power_sgd`` or an object of
            `torchmn.comm.codecs`; default: the communicator's ``allreduce_grad_dtype``. ``auto``
            chooses by measurement.
        schedule: ``every_step``, ``double_buffering``, ``periodic_average``, ``block_momentum``,
            ``diloco``, ``parameter_server`` or an object of `torchmn.schedules`. ``auto`` chooses
            by measurement.
        allow_lossy: ``codec="auto"`` may choose codecs that lose bits.
        allow_stale: ``schedule="auto"`` may choose ``double_buffering``, whose gradients are a step
            late. Without it, and whatever ``auto`` selects, every ``p.grad`` is the mean of this
            step when ``backward()`` returns.
        retune: whether they choose again when steps have become slower.
        weight: ``rank`` is the mean of the ranks' means; ``samples`` weights them by the number of
            samples that the model's forward has seen; `MultiNodeOptimizer.set_weight` by anything.
            By default ``samples`` where a loader of `torchmn.scatter_loader` gives the ranks of
            ``comm`` parts of batches, which may differ by a sample, and gradients are means of
            single steps; else ``rank``. The loader may be made before or after the optimizer.
        reduction: ``mean`` over ranks, for a loss that is a mean over the batch; ``sum``, for one
            that is a sum over it, as torch's losses with ``reduction="sum"``. N ranks then give
            the parameters of one. Under local updates, and with ``weight``, a sum makes no sense
            and is refused.
        on_nonfinite: what `step` does about a mean that is not finite, on all ranks:
            ``raise``, ``warn`` or ``ignore``. A GradScaler leaves such a step out by itself.
        max_grad_norm: clip the mean by its global norm before each step.
        gradient_as_bucket_view: every ``p.grad`` is the memory of the exchange, as under the option
            of this name of DistributedDataParallel. That saves a copy of all gradients per step,
            and a gradient that the script keeps over `zero_grad` is overwritten by the next pass.

    Raises:
        UnknownNameError, UsageError: a name or a parameter is not known.
        RankMismatchError: the ranks' models differ.
        UnsupportedError: a combination that makes no sense.

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
    if weight not in (None, "rank", "samples"):
        raise UnknownNameError("weight", weight, ("rank", "samples"))
    if on_nonfinite not in ("raise", "warn", "ignore"):
        raise UnknownNameError("on_nonfinite", on_nonfinite, ("raise", "warn", "ignore"))
    if reduction not in ("mean", "sum"):
        raise UnknownNameError("reduction", reduction, ("mean", "sum"))
    if reduction == "sum" and weight not in (None, "rank"):
        raise UnsupportedError(
            f"weight={weight!r} and reduction='sum' contradict each other: weights divide a mean, "
            "and the gradients of a summed loss are added as they are. Leave weight= out, or let "
            "the loss be a mean over the batch."
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(f"max_grad_norm={max_grad_norm} must be a positive number.")
    if double_buffering and schedule not in (None, "double_buffering"):
        raise UnsupportedError(
            f"double_buffering=True and schedule={schedule!r} contradict each other. Give one."
        )
    name = schedule or ("double_buffering" if double_buffering else "every_step")
    if name == "every_step_next_forward":
        raise UnsupportedError(
            "schedule='every_step_next_forward' does not exist any more. Use 'every_step', with a "
            "codec where the exchange takes too long, or 'double_buffering'."
        )
    if isinstance(name, str) and name not in ("auto", *SCHEDULES):
        raise UnknownNameError("schedule", name, ["auto", *SCHEDULES])
    tuner = None
    candidates: list[Schedule] = []
    if "auto" in (name, codec):
        space = _search_space(
            name,
            codec,
            comm,
            allow_lossy=allow_lossy,
            allow_stale=allow_stale,
        )
        tuner = Autotuner(space, retune=retune)
        candidates = [make() for make in space.schedules.values()]
        name, codec = next(iter(space.schedules)), space.codecs[0]
    chosen = SCHEDULES[name]() if isinstance(name, str) else name
    if reduction == "sum" and chosen.has_own_steps:
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
    models = modules_of(model, comm)
    if any(isinstance(each, DistributedDataParallel) for each in models):
        raise UnsupportedError(
            f"{comm.rank_label}: the model is a DistributedDataParallel, which exchanges its "
            "gradients by itself. Give the module inside it (model.module) and drop the wrapper, "
            "or stay with it and use torchmn.exchange.optimizer.ddp_hook."
        )
    if any(is_distributed(p) for p in parameters_of(optimizer)):
        _raise_if_whole_only(comm, [chosen, *candidates])
    chains = find_chains(models, comm, max_grad_norm)
    form = own_codec(codec, comm)
    is_counted = weight is None
    may_differ = is_counted and reduction == "mean" and chosen.averages_gradients
    weight = weight or "rank"
    made = _kind(
        optimizer,
        comm,
        models,
        chosen,
        form,
        zero_fill=zero_fill,
        weight=weight,
        reduction=reduction,
        on_nonfinite=on_nonfinite,
        max_grad_norm=max_grad_norm,
        gradient_as_bucket_view=gradient_as_bucket_view,
        tuner=tuner,
    )
    for chain in chains:
        chain.register_no_sync(made.no_sync)
    if may_differ or (is_counted and chosen.counts_samples):
        made.follow_batches()
    compare_random_numbers(comm, models)
    if (
        tuner is None and codec is not None and not isinstance(chosen, ParameterServer)
    ):  # it pushes between all ranks
        warn_if_it_encodes_nothing(form, comm)
    return made


def _raise_if_whole_only(comm: Communicator, schedules: Sequence[Schedule]) -> None:
    """Raise UnsupportedError: one of these needs parameters that are whole on every rank."""
    for schedule in schedules:
        if not schedule.exchanges_shards:
            raise UnsupportedError(
                f"{comm.rank_label}: {schedule.name} updates parameters on other ranks, and "
                "those of this model are sharded (DTensors), of which each rank holds a part. Use "
                "'every_step', 'double_buffering' or a schedule of blocks, such as 'diloco'."
            )


def _search_space(
    schedule: str | Schedule,
    codec: str | Codec | None,
    comm: Communicator,
    *,
    allow_lossy: bool,
    allow_stale: bool,
) -> SearchSpace:
    """What ``auto`` may choose. Raises UnsupportedError: an object, or one that has no step."""
    if not isinstance(schedule, str) or not (codec is None or isinstance(codec, str)):
        raise UnsupportedError(
            f"'auto' chooses among names, but schedule={schedule!r} and codec={codec!r} hold an "
            "object. Give the other one by name, or both as objects."
        )
    if comm.codec is not None:
        raise UnsupportedError(
            f"The communicator was made with allreduce_grad_dtype={comm.codec.name!r}, so there is "
            "nothing to choose. Remove allreduce_grad_dtype or 'auto'."
        )
    schedules, codecs = [schedule], [codec or "float32"]
    if schedule == "auto":
        schedules = SINGLE_STEPS if allow_stale else ["every_step"]
    elif schedule not in SINGLE_STEPS:
        raise UnsupportedError(
            f"codec='auto' compares single steps, and schedule={schedule!r} has none that are "
            "comparable. Give the codec."
        )
    if codec == "auto":
        codecs = ["float32", *(LOSSY_CODECS if allow_lossy else [])]
    return SearchSpace(schedules={name: SCHEDULES[name] for name in schedules}, codecs=codecs)
