"""CNTK's ``cntk.train.distributed``: distributed learners and the communicator."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import ResultWarning, UnsupportedError, UsageError
from torchmn.base.names import CodecName, RouteName
from torchmn.base.warn import warn
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.cntk.learner import Learner, LearnerSet
from torchmn.comm import Communicator as Ranks
from torchmn.comm import create_communicator
from torchmn.comm.collectives import allgather_for
from torchmn.data.stream_reading import recognizable
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.schedules import BlockMomentum, EveryStep, Schedule, Warmup

_CODEC_OF_BITS: dict[int, CodecName] = {
    32: "float32",
    16: "float16",
    8: "int8",
    4: "int4",
    2: "int2",
    1: "1bit",
}

__all__ = [
    "Communicator",
    "DistributedLearner",
    "WorkerDescriptor",
    "block_momentum_distributed_learner",
    "data_parallel_distributed_learner",
    "mpi_communicator",
]


_of_process: list[Ranks] = []  # the communicator that all ranks of the job share, once it was made


def default_communicator(route: RouteName | Literal["auto"] = "auto") -> Ranks:
    """The `torchmn.Communicator` of all ranks of this job, made at the first call. *Collective.*"""
    if not _of_process:
        _of_process.append(create_communicator(route))
    return _of_process[0]


@dataclass(frozen=True)
class WorkerDescriptor:
    """One rank of the job, and the name of its host.

    >>> from torchmn.cntk.train.distributed import WorkerDescriptor
    >>> WorkerDescriptor(global_rank=1, host_id="a").host_id
    'a'
    """

    global_rank: int
    host_id: str


class Communicator:
    """CNTK's names for the communicator of the process, which is `ranks`.

    ``Communicator.rank()``, ``num_workers()`` and ``finalize()`` are called on the class. The first
    use of it is *collective*: all ranks of the job meet.

    >>> from torchmn.cntk import Communicator
    >>> Communicator.rank(), Communicator.num_workers(), Communicator().is_main()
    (0, 1, True)
    """

    @property
    def ranks(self) -> Ranks:
        """The `torchmn.Communicator`."""
        return default_communicator()

    @staticmethod
    def rank() -> int:
        """The number of this rank."""
        return default_communicator().rank

    @staticmethod
    def num_workers() -> int:
        """The number of ranks."""
        return default_communicator().size

    @staticmethod
    def finalize() -> None:
        """Leave the job; call it at the end of a script. *Collective.*"""
        default_communicator().finalize()

    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return default_communicator().rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. *Collective.*"""
        default_communicator().barrier()

    def workers(self) -> list[WorkerDescriptor]:
        """All ranks."""
        hosts = default_communicator().topology.hosts
        return [WorkerDescriptor(rank, host) for rank, host in enumerate(hosts)]

    def current_worker(self) -> WorkerDescriptor:
        """This rank."""
        return self.workers()[self.rank()]


def mpi_communicator(route: RouteName | Literal["auto"] = "auto") -> Communicator:
    """The communicator of the process, under any launcher. *Collective* at the first call.

    The first call may choose the ``route`` of sums, as for `torchmn.create_communicator`.

    Raises UsageError: the communicator was made before, with another route.

    >>> from torchmn import cntk
    >>> communicator = cntk.mpi_communicator()
    >>> communicator.rank(), communicator.is_main()
    (0, True)
    """
    was_made = bool(_of_process)
    comm = default_communicator(route)
    if was_made and route not in ("auto", comm.name):
        raise UsageError(
            f"{comm.rank_label}: mpi_communicator({route!r}) was called when the communicator had "
            f"been made with the route {comm.name!r}. Call it before Communicator.rank() and "
            "before the first Trainer."
        )
    return Communicator()


@dataclass(frozen=True, kw_only=True)
class DistributedLearner:
    """A learner, and how ranks exchange: `Trainer` makes a multi-node optimizer of it.

    >>> from torchmn import cntk
    >>> sgd = cntk.sgd(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    >>> distributed = cntk.data_parallel_distributed_learner(sgd)
    >>> isinstance(distributed, cntk.DistributedLearner)
    True
    >>> distributed.total_number_of_samples_seen
    0
    """

    learner: Optimizer
    name: str
    """Name of the function that has made it."""
    options: Mapping[str, Any]
    """Arguments of that function."""
    schedule: Callable[[], Schedule]
    """Makes the schedule of an optimizer."""
    codec: CodecName | None = None
    comm: Ranks | None = None
    """The ranks that exchange; None for all ranks of the job."""

    @property
    def total_number_of_samples_seen(self) -> int:
        """Samples over all workers; 0 for a learner that counts none. Local."""
        return getattr(self.learner, "total_number_of_samples_seen", 0)


def data_parallel_distributed_learner(
    learner: Optimizer,
    distributed_after: float = 0,
    num_quantization_bits: int = 32,
    use_async_buffered_parameter_update: bool = False,
    *,
    comm: Ranks | None = None,
) -> DistributedLearner:
    """A learner whose gradients are summed over all ranks at every minibatch. Local.

    Args:
        learner: one of this module, or any `torch.optim.Optimizer`, which gets mean gradients.
        distributed_after: samples over all ranks until which gradients are sent in float32.
        num_quantization_bits: 32, 16, 8, 4, 2 or 1; below 16 with error feedback.
        use_async_buffered_parameter_update: refused, as by CNTK.
        comm: the ranks; default: all of the job.

    Raises UsageError: another number of bits; UnsupportedError: asynchronous updates.

    >>> from torchmn import cntk
    >>> sgd = cntk.sgd(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    >>> cntk.data_parallel_distributed_learner(sgd, num_quantization_bits=1).learner is sgd
    True
    """
    if use_async_buffered_parameter_update:
        raise UnsupportedError(
            "use_async_buffered_parameter_update=True is refused, as by CNTK. For gradients that "
            "are a step late, call torchmn.create_multi_node_optimizer(..., "
            "schedule='double_buffering') in a loop of your own."
        )
    if num_quantization_bits not in _CODEC_OF_BITS:
        raise UsageError(
            f"num_quantization_bits={num_quantization_bits!r} must be one of "
            f"{', '.join(map(str, _CODEC_OF_BITS))}."
        )
    return DistributedLearner(
        learner=learner,
        name="data_parallel_distributed_learner",
        codec=_CODEC_OF_BITS[num_quantization_bits],
        schedule=lambda: _after(distributed_after, EveryStep()),
        options={
            "distributed_after": distributed_after,
            "num_quantization_bits": num_quantization_bits,
        },
        comm=comm,
    )


def block_momentum_distributed_learner(
    learner: Optimizer,
    block_size: float,
    block_momentum_as_time_constant: float | None = None,
    use_nestrov_momentum: bool = True,  # CNTK's spelling
    reset_sgd_momentum_after_aggregation: bool = True,
    block_learning_rate: float = 1.0,
    distributed_after: float = 0,
    *,
    comm: Ranks | None = None,
) -> DistributedLearner:
    """A learner of ranks that train alone for a block; a momentum is applied to blocks. Local.

    Args:
        learner: as for `data_parallel_distributed_learner`. Rates and momenta are for the samples
            of one rank.
        block_size: samples over all ranks.
        block_momentum_as_time_constant: samples over all ranks; 0: no block momentum.
        use_nestrov_momentum: apply Nesterov's momentum to blocks.
        reset_sgd_momentum_after_aggregation: set the learner's momentum to zero after each block.
        block_learning_rate: scales what a block has changed.
        distributed_after: samples over all ranks until which gradients are averaged at every step.
        comm: the ranks; default: all of the job.

    `torchmn.schedules.BlockMomentum` has the formula. `Trainer` raises UsageError for values out of
    range.

    >>> from torchmn import cntk
    >>> sgd = cntk.sgd(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    >>> cntk.block_momentum_distributed_learner(sgd, block_size=4096).learner is sgd
    True
    """
    options: dict[str, Any] = {  # in the order of BlockMomentum
        "block_size": block_size,
        "block_momentum_as_time_constant": block_momentum_as_time_constant,
        "use_nestrov_momentum": use_nestrov_momentum,
        "reset_sgd_momentum_after_aggregation": reset_sgd_momentum_after_aggregation,
        "block_learning_rate": block_learning_rate,
    }
    return DistributedLearner(
        learner=learner,
        name="block_momentum_distributed_learner",
        schedule=lambda: _after(distributed_after, BlockMomentum(*options.values())),
        options={**options, "distributed_after": distributed_after},
        comm=comm,
    )


def _after(num_samples: float, schedule: EveryStep | BlockMomentum) -> Schedule:
    return Warmup(num_samples, schedule) if num_samples else schedule


def optimizers_of(
    learners: Sequence[DistributedLearner | Optimizer], models: Sequence[nn.Module]
) -> tuple[Ranks | None, list[Optimizer]]:
    """The optimizers of the learners and the communicator of distributed ones. *Collective.*"""
    if not learners:
        raise UsageError("A trainer needs a learner, such as sgd(model.parameters(), 0.1).")
    for learner in learners:
        if not isinstance(learner, (DistributedLearner, Optimizer)):
            raise UsageError(
                f"{learner!r} is no learner. Give what sgd() and its neighbours return, a "
                "torch.optim.Optimizer, or a distributed learner around one."
            )
    local = [each.learner if isinstance(each, DistributedLearner) else each for each in learners]
    _raise_if_shared(local)
    for number, learner in enumerate(local):
        if isinstance(learner, Learner):
            learner.number = number
    first, *others = learners
    if isinstance(first, MultiNodeOptimizer) and not others:
        return first.communicator, [first]
    distributed = [each for each in learners if isinstance(each, DistributedLearner)]
    plain = [each for each in learners if isinstance(each, Optimizer)]
    if not (distributed or any(isinstance(each, MultiNodeOptimizer) for each in plain)):
        _warn_of_separate_training()
        return None, plain
    ways = [(each.name, each.options, each.comm) for each in distributed]
    if plain or any(way != ways[0] for way in ways):
        raise UsageError(
            "The learners of a trainer are not distributed in the same way: "
            f"{'; '.join(map(_how_distributed, learners))}. Give all of them to the same "
            "distributed learner of torchmn.cntk, with the same options."
        )
    same = distributed[0]
    comm = same.comm or default_communicator()
    inner = LearnerSet(local) if others else same.learner
    made = create_multi_node_optimizer(
        inner, comm, models, codec=same.codec, schedule=same.schedule(), weight="samples"
    )
    return comm, [made]


def _how_distributed(learner: DistributedLearner | Optimizer) -> str:
    if isinstance(learner, DistributedLearner):
        given = {**learner.options, "comm": learner.comm}
        return f"{learner.name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
    is_shared = isinstance(learner, MultiNodeOptimizer)
    return "a multi-node optimizer" if is_shared else "not distributed"


def _raise_if_shared(optimizers: Sequence[Optimizer]) -> None:
    owners: dict[Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(parameter, number) != number:
                    raise UsageError(
                        f"Learners {owners[parameter]} and {number} both have a parameter of shape "
                        f"{tuple(parameter.shape)}. Give each parameter to one learner."
                    )


def warn_if_equal(minibatch: Sequence[Tensor | np.ndarray[Any, Any]], comm: Ranks) -> None:
    """Warn if another rank was given the same samples, which then count twice. *Collective.*"""
    own = recognizable(minibatch)
    other = allgather_for(comm, "the first minibatches", own).index(own)
    if own and other < comm.rank:
        warn(
            f"{comm.rank_label}: this rank and rank {other} were given the same first minibatch, "
            "so that its samples count twice. Give next_minibatch() "
            "num_data_partitions=Communicator.num_workers() and "
            "partition_index=Communicator.rank(), or train_minibatch() a part of each array.",
            ResultWarning,
        )


def _warn_of_separate_training() -> None:
    launched = read_launcher_env(os.environ)
    if launched is not None and launched.rank == 0 and launched.size > 1:
        warn(
            f"This job has {launched.size} workers, and no learner of the trainer is distributed: "
            "each worker trains by itself. For one training on all of them use "
            "data_parallel_distributed_learner(learner).",
            ResultWarning,
        )
