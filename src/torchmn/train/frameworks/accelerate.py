"""Accelerate, and the Trainer of Transformers, which is built on it.

Accelerate's `Accelerator` starts no processes: it finds them, makes torch's default process group
(for its ``gather`` and ``reduce``), shards the data, and would wrap models in
DistributedDataParallel. `attach` leaves the wrapping out and makes the prepared optimizers
multi-node optimizers. The classes here are mixed with that of the object, which may be the user's
own; nothing of the two libraries is imported.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.data import rank_seeds
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.replicas import parameters_of
from torchmn.train.frameworks.exchange import Exchange, ExchangeOptions, FrameworkOptimizer

_Base: Any = object  # at run time the class of the object follows in the order of base classes
T = TypeVar("T")


def attach(target: T, options: ExchangeOptions | None = None) -> T:
    """Let torchmn exchange the gradients of an ``Accelerator`` or ``Trainer``; returns it.

    *Collective.* Call it before ``accelerator.prepare(...)``, or before ``trainer.train()``.
    Accumulation, clipping, mixed precision, ``gather_for_metrics``, ``save_state`` and
    ``resume_from_checkpoint`` work as before. Under local updates a block ends where the Trainer
    evaluates or saves and in ``save_state``; call ``target.flush()``, *collective*, before you
    evaluate with an Accelerator, so that all ranks hold the same parameters then.

    Args:
        target: an ``accelerate.Accelerator``, or a ``transformers.Trainer`` or an object of a class
            derived from it, such as TRL's.
        options: codec, schedule and the like; default: every step in float32.

    Raises:
        UsageError: ``target`` is neither of them, it has already prepared something, or it trains
            on another device than torchmn.
        UnsupportedError: it uses DeepSpeed, FSDP, Megatron-LM or XLA.
        TopologyError: its rank or number of ranks is not that of torchmn.

    >>> from accelerate import Accelerator
    >>> from torchmn.train.frameworks import ExchangeOptions, attach
    >>> accelerator = attach(Accelerator(cpu=True), ExchangeOptions(codec="int8"))
    >>> model = torch.nn.Linear(3, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = accelerator.prepare(model, sgd)
    >>> accelerator.backward(model(torch.ones(2, 3)).sum())
    >>> optimizer.step()
    """
    exchange = Exchange(options or ExchangeOptions())
    accelerator = getattr(target, "accelerator", target)
    if not all(hasattr(accelerator, name) for name in ("prepare_model", "distributed_type")):
        raise UsageError(
            f"attach() is for an accelerate.Accelerator or a transformers.Trainer, but got "
            f"{type(target).__name__}. For Lightning there is lightning_strategy(), for loops of "
            "your own torchmn.create_multi_node_optimizer()."
        )
    _attach_accelerator(accelerator, exchange)
    if accelerator is not target:
        _mix(target, TrainerExchange, exchange)
    return target


class AcceleratorExchange(_Base):
    """An ``Accelerator`` whose gradients torchmn exchanges; mixed with its class by `attach`."""

    exchange: Exchange

    def prepare_model(self, model: Any, device_placement: Any = None, *_: Any, **__: Any) -> Any:
        """See Accelerate's ``prepare_model``; without DistributedDataParallel. Local."""
        # In evaluation mode Accelerate moves and casts a model, but does not wrap it.
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate's ``prepare_data_loader``. Local.

        Raises UsageError: torchmn divides it among the ranks already.
        """
        self.exchange.raise_if_divided(data_loader)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate's ``prepare``. *Collective.*"""
        result = super().prepare(*args, **kwargs)
        for prepared in self._optimizers:
            inner = prepared.optimizer
            wanted = set(parameters_of(inner))
            models = [m for m in self._models if not wanted.isdisjoint(m.parameters())]
            known = {parameter for model in models for parameter in model.parameters()}
            if isinstance(inner, FrameworkOptimizer):
                if inner not in self.exchange.optimizers:  # prepared before free_memory()
                    self.exchange.keep(inner, models)
                continue
            if isinstance(inner, MultiNodeOptimizer) or not wanted <= known:
                continue
            wrapped = self.exchange.wrap(inner, models, self.device)
            prepared.__setstate__({"optimizer": wrapped})  # as after unpickling: it looks at step
        return result

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """See Accelerate's ``backward``. *Collective* outside ``no_sync``.

        Raises UsageError: a model was prepared without its optimizer, or an optimizer without a
        model.
        """
        super().backward(loss, **kwargs)
        optimizers = [prepared.optimizer for prepared in self._optimizers]
        self.exchange.raise_if_left_out(self._models, optimizers)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """See Accelerate's ``no_sync``. Local."""
        with self.exchange.no_sync(model):
            yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """See Accelerate's ``join_uneven_inputs``: means are over ranks with data. *Collective.*"""
        samplers: list[Any] = [getattr(x, "batch_sampler", None) for x in self._dataloaders]
        samplers = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
        before = [sampler.even_batches for sampler in samplers]
        with ExitStack() as stack:
            if even_batches is not None:
                for sampler in samplers:
                    sampler.even_batches = even_batches
            if not (self.even_batches if even_batches is None else even_batches):
                for optimizer in self.exchange.optimizers:
                    stack.enter_context(optimizer.join())
            try:
                yield
            finally:
                for sampler, is_even in zip(samplers, before, strict=True):
                    sampler.even_batches = is_even

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate's ``save_state``; holds the states of all ranks. *Collective.*"""
        self.exchange.agree()
        with self.exchange.gathered_states():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate's ``load_state``; also restores random generators. *Collective.*"""
        result = super().load_state(*args, **kwargs)
        rank_seeds.share_equal_numbers(self.exchange.connect(self.device))
        return result

    def free_memory(self, *objects: Any) -> Any:
        """See Accelerate's ``free_memory``. Local."""
        self.exchange.forget()
        return super().free_memory(*objects)

    def flush(self) -> None:
        """Apply all that was exchanged, and end a block of local updates. *Collective.*

        All ranks hold the same parameters and running statistics then, as for an evaluation.
        """
        self.exchange.flush()


class TrainerExchange(_Base):
    """A ``Trainer`` whose gradients torchmn exchanges; mixed with its class by `attach`."""

    exchange: Exchange
    _has_best_model = False  # whether `train` has loaded it, after a flush

    def create_accelerator_and_postprocess(self) -> None:
        """See Transformers: it makes a new ``Accelerator``. *Collective.*"""
        super().create_accelerator_and_postprocess()
        _attach_accelerator(self.accelerator, self.exchange)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See Transformers' ``train``. *Collective.*"""
        self._has_best_model = False
        output = super().train(*args, **kwargs)
        if not self._has_best_model:
            self.exchange.flush()
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """See Transformers' ``evaluate``. *Collective.*"""
        self.exchange.agree()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See Transformers' ``predict``. *Collective.*"""
        self.exchange.agree()
        return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """See Transformers' ``save_model``. *Collective.*"""
        self.exchange.agree_on_parameters()
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.exchange.agree()
        super()._save_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.exchange.flush()  # later it would change the best model
        self._has_best_model = True
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self.exchange.gathered_states():  # rank 0 alone asks for the state
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _load_rng_state(self, *args: Any, **kwargs: Any) -> None:
        super()._load_rng_state(*args, **kwargs)
        rank_seeds.share_equal_numbers(self.exchange.connect(self.accelerator.device))

    def flush(self) -> None:
        """Apply all that was exchanged, and end a block of local updates. *Collective.*"""
        self.exchange.flush()


def _attach_accelerator(accelerator: Any, exchange: Exchange) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UnsupportedError(
            f"attach() exchanges the gradients of whole models, and this Accelerator uses {kind}, "
            "which does so itself. Configure Accelerate for several CPUs or GPUs without it."
        )
    if isinstance(accelerator, AcceleratorExchange) or accelerator._models:
        raise UsageError(
            "attach() was called after accelerator.prepare(), or twice. Call it once, directly "
            "after the Accelerator or the Trainer is made."
        )
    exchange.connect(accelerator.device)
    _mix(accelerator, AcceleratorExchange, exchange)


def _mix(target: Any, ours: type, exchange: Exchange) -> None:
    """Change the class of an object to one in which ``ours`` precedes the object's own class."""
    # The libraries call their methods through ``self``, which an object around this one would miss.
    own = type(target)
    target.__class__ = type(own.__name__, (ours, own), {"__doc__": own.__doc__})
    target.exchange = exchange
