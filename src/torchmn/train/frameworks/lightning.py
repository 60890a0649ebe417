"""Lightning: strategies for its Trainer and for Fabric.

They are its `DDPStrategy` without DistributedDataParallel: Lightning starts or finds the processes,
makes its process group (which torchmetrics uses), and shards the data; the model stays as it is,
and its optimizers are multi-node optimizers. Nothing of Lightning is imported before a strategy is
asked for: the classes here are mixed with Lightning's own then.
"""

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from torchmn.base.errors import UsageError
from torchmn.data.batch_size import num_samples
from torchmn.exchange.replicas import parameters_of
from torchmn.train.frameworks.exchange import Exchange, ExchangeOptions, FrameworkOptimizer

_Base: Any = object  # at run time a class of Lightning's follows in the order of base classes
_MEANS, _SUMS = ("mean", "avg"), ("sum", None)
_STEPS_OF_EVALUATION = [
    *("validation_step", "on_validation_batch_start", "on_validation_batch_end"),
    *("test_step", "on_test_batch_start", "on_test_batch_end"),
]


def lightning_strategy(
    options: ExchangeOptions | None = None, *, exact_evaluation: bool = True, **lightning: Any
) -> Any:
    """A ``strategy=`` for Lightning's ``Trainer``, whose gradients torchmn exchanges. Local.

    Clipping, accumulation, precision plugins, manual optimization, callbacks and loggers work as
    under Lightning's own strategy. Under local updates a block ends where Lightning validates or
    saves, so that all ranks hold the same parameters then.

    Args:
        options: codec, schedule and the like; default: every step in float32.
        exact_evaluation: divide validation and test sets without repeating samples. The last batch
            may then exist on some ranks only, so ``validation_step`` must not communicate;
            ``self.log(..., sync_dist=True)`` and torchmetrics do so at the end of the epoch.
        lightning: arguments of Lightning's ``DDPStrategy``, such as ``process_group_backend``.

    Raises ImportError: Lightning is not installed.

    >>> from lightning.pytorch import Trainer
    >>> from torchmn.train.frameworks import ExchangeOptions, lightning_strategy
    >>> strategy = lightning_strategy(ExchangeOptions(codec="int8"))
    >>> trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy)
    >>> trainer.strategy is strategy
    True
    """
    made = _class("pytorch", TrainerStrategy)(**lightning)
    made.exchange = Exchange(options or ExchangeOptions())
    made.exact_evaluation = exact_evaluation
    made.flushing = _class("pytorch", FlushCallback, "callbacks", "Callback")()
    made.flushing.exchange = made.exchange
    return made


def fabric_strategy(options: ExchangeOptions | None = None, **lightning: Any) -> Any:
    """A ``strategy=`` for ``Fabric``, whose gradients torchmn exchanges. Local.

    Models and optimizers are set up together: ``fabric.setup(model, optimizer)``. Call
    ``strategy.flush()``, *collective*, before you evaluate or save under local updates.

    Args:
        options: codec, schedule and the like; default: every step in float32.
        lightning: arguments of Fabric's ``DDPStrategy``, such as ``process_group_backend``.

    Raises ImportError: Lightning is not installed.

    >>> from lightning.fabric import Fabric
    >>> from torchmn.train.frameworks import ExchangeOptions, fabric_strategy
    >>> strategy = fabric_strategy(ExchangeOptions(codec="int8"))
    >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    >>> fabric.strategy is strategy
    True
    """
    made = _class("fabric", FabricStrategy)(**lightning)
    made.exchange = Exchange(options or ExchangeOptions())
    made._backward_sync_control = _SyncControl(made.exchange)
    return made


class _Collectives(_Base):
    """Lightning's collectives over the communicator: named, with a time limit, in hang reports."""

    exchange: Exchange

    def setup_environment(self) -> None:
        """See Lightning's ``Strategy.setup_environment``. *Collective.*"""
        super().setup_environment()
        self.exchange.connect(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """See Lightning's ``Strategy.process_dataloader``. Local.

        Raises UsageError: Lightning has divided among the ranks what is this rank's part already.
        """
        dataloader = super().process_dataloader(dataloader)
        if isinstance(_sampler_of(dataloader), DistributedSampler):
            self.exchange.raise_if_part(
                dataloader.dataset,
                "Give it the whole data set, or use_distributed_sampler=False to the Trainer or to "
                "setup_dataloaders().",
            )
        return dataloader

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """See Lightning's ``Strategy.barrier``. *Collective.*"""
        comm = self.exchange.communicator
        if comm is None:
            super().barrier(name, *args, **kwargs)
        else:
            comm.barrier()

    def _reduced(self, tensor: Any, group: Any, reduce_op: Any, other: Callable[..., Any]) -> Any:
        comm = self.exchange.communicator
        op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        if comm is None or group is not None or not isinstance(tensor, Tensor):
            return other(tensor, group, reduce_op=reduce_op)
        if op in _MEANS:
            # Lightning cuts the mean of integers off, and divides by that of ranks' batch sizes.
            return comm.allreduce(tensor if tensor.is_floating_point() else tensor.double(), "mean")
        if op in _SUMS:
            return comm.allreduce(tensor)
        return other(tensor, group, reduce_op=reduce_op)


class TrainerStrategy(_Collectives):
    """The strategy of Lightning's Trainer; mixed with its ``DDPStrategy``."""

    exact_evaluation = True
    flushing: Any  # a `FlushCallback`
    # Whether ranks have unequal numbers of batches of some evaluation.
    _has_uneven_evaluation = False

    def configure_ddp(self) -> None:
        """Do nothing: the model is not wrapped in DistributedDataParallel. Local."""

    def setup_optimizers(self, trainer: Any) -> None:
        """See Lightning's ``Strategy.setup_optimizers``. *Collective.*"""
        super().setup_optimizers(trainer)
        if self.flushing not in trainer.callbacks:
            trainer.callbacks.insert(0, self.flushing)
        self.exchange.close()  # Lightning sets up anew at each fit(), also after a failed one
        model = self.lightning_module
        self.optimizers = [
            self.exchange.wrap(optimizer, [model], self.root_device)
            if parameters_of(optimizer)
            else optimizer  # that of a module without any
            for optimizer in self.optimizers  # type: ignore[has-type]
        ]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Lightning's ``Strategy.training_step``; counts the samples of a batch. Local."""
        counting = [o for o in self.exchange.optimizers if o.counts_samples]
        before = [o.reducer.contribution.num_samples for o in counting]
        output = super().training_step(*args, **kwargs)
        if self.lightning_module.automatic_optimization:  # backward comes later
            for optimizer, number in zip(counting, before, strict=True):
                own = optimizer.reducer.contribution
                if own.num_samples == number:  # training_step called layers and not self(...)
                    own.add(num_samples(args[0] if args else None) or 0)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """See Lightning's ``ParallelStrategy.block_backward_sync``. Local."""
        with self.exchange.no_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Lightning's ``Strategy.reduce``. *Collective.*"""
        self._raise_if_uneven()
        return self._reduced(tensor, group, reduce_op, super().reduce)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """See Lightning's ``Strategy.all_gather``. *Collective.*"""
        self._raise_if_uneven()
        gathered: Tensor = super().all_gather(tensor, *args, **kwargs)
        return gathered

    def _raise_if_uneven(self) -> None:
        """Raise UsageError: an evaluation step communicates, and some ranks do not make it."""
        hook = self.lightning_module and self.lightning_module._current_fx_name
        if self._has_uneven_evaluation and hook in _STEPS_OF_EVALUATION:
            comm = self.exchange.connect(self.root_device)
            raise UsageError(
                f"{comm.rank_label}: {hook} communicates, as self.log(..., on_step=True, "
                "sync_dist=True) and self.all_gather do, but some ranks have a batch more than "
                "others: the samples are divided without repeating any. Log with on_epoch=True "
                "alone, the default there, communicate at the end of the epoch, or let samples be "
                "repeated: lightning_strategy(exact_evaluation=False)."
            )

    def process_dataloader(self, dataloader: Any) -> Any:
        """See `_Collectives.process_dataloader`. Local."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if self.exact_evaluation and not trainer.training and isinstance(dataloader, DataLoader):
            limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
            self._has_uneven_evaluation |= _leave_out_repeated(dataloader, limit)
        return dataloader

    def on_validation_start(self) -> None:
        """Give all ranks the same parameters, to evaluate them. *Collective.*"""
        self.exchange.agree()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See Lightning's ``Strategy.lightning_module_state_dict``. *Collective.*"""
        self.exchange.agree()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """See Lightning's ``Strategy.optimizer_state``: of all ranks. *Collective.*"""
        own = getattr(optimizer, "_optimizer", optimizer)
        if isinstance(own, FrameworkOptimizer):
            return own.gathered_state_dict()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def teardown(self) -> None:
        """See Lightning's ``Strategy.teardown``. Local."""
        # Lightning moves their states to the CPU now, and a script may go on with them alone.
        self.optimizers = [getattr(optimizer, "inner", optimizer) for optimizer in self.optimizers]
        self.exchange.close()
        super().teardown()


class FlushCallback(_Base):
    """Flushes at the end of training; mixed with Lightning's ``Callback``.

    It is the first callback: those of the user may save the parameters, or replace them by an
    average, to which no pending update may be applied.
    """

    exchange: Exchange

    def on_train_end(self, *_: Any) -> None:
        """Apply all that was exchanged. *Collective.*"""
        self.exchange.flush()


class FabricStrategy(_Collectives):
    """The strategy of Fabric; mixed with its ``DDPStrategy``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Modules that were set up without an optimizer: to evaluate them.
        self._alone: list[nn.Module] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged. Local."""
        self._alone.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise UsageError: an optimizer is set up together with its module."""
        raise UsageError(
            "torchmn's strategy needs the module of an optimizer. Set both up together: "
            "model, optimizer = fabric.setup(model, optimizer)."
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """See Fabric's ``Strategy.setup_module_and_optimizers``. *Collective.*"""
        wrapped: list[Optimizer] = [
            self.exchange.wrap(optimizer, [module], self.root_device) for optimizer in optimizers
        ]
        return module, wrapped, scheduler

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """See Fabric's ``Strategy.backward``. *Collective* outside ``no_backward_sync``."""
        super().backward(tensor, module, *args, **kwargs)
        self.exchange.raise_if_left_out(self._alone)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Fabric's ``Strategy.all_reduce``. *Collective.*"""
        return self._reduced(tensor, group, reduce_op, super().all_reduce)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """See Fabric's ``Strategy.get_optimizer_state``: of all ranks. *Collective.*"""
        if isinstance(optimizer, FrameworkOptimizer):
            return optimizer.gathered_state_dict()
        state: dict[str, Any] = super().get_optimizer_state(optimizer)
        return state

    def flush(self) -> None:
        """Apply all that was exchanged, and end a block of local updates. *Collective.*"""
        self.exchange.flush()


class _SyncControl:
    """Implements Fabric's ``no_backward_sync``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which gradients of ``module`` are accumulated, not exchanged. Local."""
        return self._exchange.no_sync(module) if enabled else nullcontext()


def _sampler_of(loader: object) -> object:
    """The sampler that a loader draws indices from, also below a user's batch sampler. Local."""
    sampler = getattr(loader, "sampler", None)
    return getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)


def _leave_out_repeated(loader: DataLoader[Any], limit: float) -> bool:
    """Stop a DistributedSampler from repeating samples to make parts equally long. Local.

    Returns whether ranks then have different numbers of batches. ``limit`` is Lightning's: a number
    of batches, or a fraction of them.
    """
    sampler = _sampler_of(loader)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return False
    num_samples, most = len(cast(Sized, sampler.dataset)), len(loader)
    before, sampler.num_samples = sampler.num_samples, num_samples // sampler.num_replicas
    fewest = len(loader)  # computed from the sampler: as on the rank with the fewest samples
    if fewest * limit < 1:  # Lightning leaves the evaluation out on a rank without any batch
        sampler.num_samples = before
        return False
    sampler.total_size = num_samples
    sampler.num_samples = len(range(sampler.rank, num_samples, sampler.num_replicas))
    return fewest < most


@cache
def _class(
    part: str, ours: type, module: str = "strategies", theirs_name: str = "DDPStrategy"
) -> Any:
    """Derive a class from ``ours`` and a class of Lightning, in the package that the script uses.

    Raises ImportError: Lightning is not installed.
    """
    names = {"pytorch": ["lightning.pytorch", "pytorch_lightning"]}
    names["fabric"] = ["lightning.fabric", "lightning_fabric"]
    for name in sorted(names[part], key=lambda name: name not in sys.modules):
        try:
            theirs = getattr(import_module(f"{name}.{module}"), theirs_name)
        except ImportError:
            continue
        return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__})
    raise ImportError(
        f"There is no {' or '.join(names[part])}. Install it: pip install 'torchmn[lightning]'."
    )
