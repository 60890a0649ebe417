"""The communicator of a framework's processes and its multi-node optimizers, for all frameworks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchmn.base.errors import TopologyError, UnsupportedError, UsageError
from torchmn.base.names import CodecName, RouteName, ScheduleName
from torchmn.comm import Communicator, create_communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.local_tensors import is_distributed
from torchmn.data import rank_seeds
from torchmn.data.scatter_loader import divided_by
from torchmn.data.sub_dataset import SubDataset
from torchmn.exchange.finiteness import OnNonfinite
from torchmn.exchange.optimizer import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.exchange.options import Auto, Weight
from torchmn.exchange.replicas import parameters_of, persistent_buffers
from torchmn.exchange.schedules import EveryStep, ParameterServer, Schedule
from torchmn.train.evaluation import sync_buffers_


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How the optimizers of a framework exchange gradients.

    Args:
        codec, schedule, weight, on_nonfinite: as in
            `torchmn.create_multi_node_optimizer`. An object of `torchmn.schedules` belongs to one
            optimizer: give its name where the framework has several.
        communicator: the route, as in `torchmn.create_communicator`.
        timeout_s: the time limit of every collective in seconds; 0 for none. Rank 0 alone writes
            checkpoints, and the others wait for it in their next exchange.

    Example:
        >>> from torchmn.train.frameworks import ExchangeOptions
        >>> ExchangeOptions(codec="int8").codec
        'int8'
    """

    codec: CodecName | Literal["auto"] | Codec | Auto | None = None
    schedule: ScheduleName | Literal["auto"] | Schedule | Auto | None = None
    weight: Weight = "rank"
    on_nonfinite: OnNonfinite = "raise"
    communicator: RouteName | Literal["auto"] = "auto"
    timeout_s: float = 600


class Exchange:
    """The communicator of a framework's processes, and its optimizers. One per framework object."""

    def __init__(self, options: ExchangeOptions) -> None:
        self.options = options
        self.optimizers: list[FrameworkOptimizer] = []
        self._comm: Communicator | None = None
        # Models whose gradients, or blocks of local updates, are exchanged.
        self._models: list[nn.Module] = []

    @property
    def communicator(self) -> Communicator | None:
        """The communicator that `connect` has made; None before. Local."""
        return self._comm

    def connect(self, device: torch.device) -> Communicator:
        """Make the communicator of the framework's processes, once. *Collective.*

        Raises TopologyError: the framework and torchmn disagree about the ranks; UsageError: about
        the device.
        """
        if self._comm is None:
            comm = create_communicator(self.options.communicator, timeout_s=self.options.timeout_s)
            _raise_if_others(comm, device)
            self._comm = comm
        return self._comm

    def wrap(
        self, optimizer: Optimizer, models: Sequence[nn.Module], device: torch.device
    ) -> FrameworkOptimizer:
        """Make a framework's optimizer a multi-node optimizer. *Collective.*

        Raises as `torchmn.create_multi_node_optimizer`.
        """
        options, comm = self.options, self.connect(device)
        if options.schedule == "parameter_server" or isinstance(options.schedule, ParameterServer):
            raise UnsupportedError(
                f"{comm.rank_label}: schedule='parameter_server' needs ranks that "
                "serve and workers that leave their loops in join(), which the framework's loop "
                "does not. Use a schedule of blocks, such as 'diloco', or a loop of your own."
            )
        modules = [module for model in models for module in model.modules()]
        if any(isinstance(module, DistributedDataParallel) for module in modules):
            raise UsageError(
                f"{comm.rank_label}: the model is in DistributedDataParallel, "
                "whose means would be averaged again. Leave it out: torchmn exchanges gradients."
            )
        if any(is_distributed(parameter) for parameter in parameters_of(optimizer)):
            raise UnsupportedError(
                f"{comm.rank_label}: parameters are sharded (DTensors), and the "
                "framework reduces their gradients itself. Give it whole parameters, or write the "
                "loop with torchmn.create_multi_node_optimizer() and a torchmn.Grid."
            )
        # A framework may have seeded all ranks alike: their dropout must differ once they train.
        rank_seeds.share_equal_numbers(comm)
        made = create_multi_node_optimizer(
            optimizer,
            comm,
            models,
            codec=options.codec,
            schedule=options.schedule,
            weight=options.weight,
            on_nonfinite=options.on_nonfinite,
            _kind=FrameworkOptimizer,
        )
        own = cast(FrameworkOptimizer, made)
        self.keep(own, models)
        return own

    def keep(self, optimizer: FrameworkOptimizer, models: Sequence[nn.Module]) -> None:
        """Include an optimizer when all are flushed, saved or joined. Local."""
        self.optimizers = [o for o in self.optimizers if not o.is_replaced] + [optimizer]
        self._models += models

    def forget(self) -> None:
        """Release optimizers and models; gradients of those in use are still exchanged. Local."""
        self.optimizers, self._models = [], []

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Accumulate gradients of the optimizers that train ``model``, or of all. Local."""
        own = None if model is None else set(model.parameters())
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if own is None or not own.isdisjoint(parameters_of(optimizer)):
                    stack.enter_context(optimizer.no_sync())
            yield

    def agree(self) -> None:
        """Give all ranks the same parameters and buffers, to save or evaluate them. *Collective.*

        Running statistics become their means over ranks. See also `agree_on_parameters`.
        """
        self.agree_on_parameters()
        self._sync_buffers()

    def agree_on_parameters(self) -> None:
        """Give all ranks the same parameters. *Collective* under local updates, else local.

        Ends a block of local updates. A mean that double buffering has not applied stays pending:
        it is in ``state_dict()``.
        """
        for optimizer in self.optimizers:
            if optimizer.schedule.traits.replica_consistency == "per_step":
                optimizer.schedule.before_access("read")
            else:
                optimizer.flush()

    def flush(self) -> None:
        """Apply all that was exchanged, at the end of training. *Collective.*"""
        for optimizer in self.optimizers:
            optimizer.flush()
        self._sync_buffers()

    def _sync_buffers(self) -> None:
        if self._comm is not None and any([*persistent_buffers(m)] for m in self._models):
            sync_buffers_(self._models, self._comm)

    @contextlib.contextmanager
    def gathered_states(self) -> Iterator[None]:
        """Run the body with ``state_dict()`` of rank 0 holding all ranks' states. *Collective.*"""
        try:
            for optimizer in self.optimizers:
                optimizer.prepared_state = optimizer.gathered_state_dict()
            yield
        finally:
            for optimizer in self.optimizers:
                optimizer.prepared_state = None

    def close(self) -> None:
        """Release the models. The communicator stays. Local."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.forget()

    def raise_if_divided(self, loader: object) -> None:
        """Raise UsageError: the framework would divide among ranks what torchmn has divided. Local.

        Each rank would train on a part of its part.
        """
        by = divided_by(loader)
        if self._comm is not None and self._comm.size > 1 and by:
            raise UsageError(
                f"{self._comm.rank_label}: {by} gives each rank its part of the data already, and "
                "the framework would divide that part among the ranks once more. Give it the "
                "DataLoader of one process, which it divides, or keep this one out of prepare()."
            )

    def raise_if_part(self, dataset: object, cure: str) -> None:
        """Raise UsageError: the framework has divided a data set of this rank alone. Local."""
        is_part = isinstance(dataset, SubDataset) and dataset.is_of_one_rank
        if self._comm is not None and self._comm.size > 1 and is_part:
            raise UsageError(
                f"{self._comm.rank_label}: the data set is this rank's part of a whole, and "
                "the framework divides it among the ranks once more: most samples would be left "
                f"out. {cure}"
            )

    def raise_if_left_out(
        self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()
    ) -> None:
        """Raise UsageError: a backward pass reached parameters that nothing exchanges. Local.

        ``optimizers`` may include plain ones, which were not wrapped since a model is missing.
        """
        if self._comm is None or self._comm.size == 1:
            return
        for optimizer in optimizers:
            trained = [] if isinstance(optimizer, MultiNodeOptimizer) else parameters_of(optimizer)
            if any(parameter.grad is not None for parameter in trained):
                known = {parameter for model in models for parameter in model.parameters()}
                missing = [tuple(p.shape) for p in trained if p not in known]
                raise UsageError(
                    f"{self._comm.rank_label}: {len(missing)} of {len(trained)} parameters of "
                    f"{type(optimizer).__name__} are in no model that was given to the framework "
                    f"(the first has the shape {missing[0]}), so that their gradients are not "
                    "exchanged, and each rank would train alone. Give it all modules that the "
                    "optimizer trains; a parameter by itself must be in one of them."
                )
        for model in models:
            if any(model is exchanged for exchanged in self._models):
                continue
            found = [name for name, p in model.named_parameters() if p.grad is not None]
            if found:
                raise UsageError(
                    f"{self._comm.rank_label}: '{found[0]}' of {type(model).__name__} has got a "
                    "gradient, but no optimizer of torchmn exchanges it, and each rank would train "
                    "alone. Give the model and its optimizer to the framework together."
                )


def _raise_if_others(comm: Communicator, device: torch.device) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (comm.rank, comm.size) != (rank, size):
        raise TopologyError(
            f"{comm.rank_label}: the framework sees this process as rank {rank} of {size}, so that "
            "its samplers and metrics would not fit torchmn's ranks. Start the script with "
            "torchmn run, torchrun or the framework's own launcher, and ask the framework for as "
            "many devices as there are ranks."
        )
    if comm.device.type != device.type:
        raise UsageError(
            f"{comm.rank_label}: the framework trains on {device} and torchmn would on "
            f"{comm.device}. Ask both for the same: torchmn run --backend gloo trains on CPUs."
        )


RANKS = "torchmn_ranks"  # key of a saved state: what differs between ranks, in rank order


class FrameworkOptimizer(MultiNodeOptimizer):
    """The multi-node optimizer in a framework's loop, made by `Exchange.wrap`.

    It differs from its base class in three points:

    - `step` runs a closure first and then steps without one, unless the inner optimizer cannot do
      without (LBFGS). Lightning passes forward, backward and clipping as a closure, to any
      optimizer; taken as a closure of `torch.optim` it would make every schedule synchronous and
      cost one more sum per step.
    - Frameworks save the state of rank 0 and load it on every rank, but residuals and local updates
      differ between ranks: `gathered_state_dict` holds those of all, and `load_state_dict` takes
      out this rank's own, or distributes them again over another number of ranks.
    - Frameworks ask several times in a step whether `step` unscales, for instance before they clip.
      In their loops every rank has a backward pass, so the answer needs no exchange.
    """

    # Returned by `state_dict` while a framework writes a checkpoint: it asks rank 0 alone, which
    # could not gather the states of the others then.
    prepared_state: dict[str, Any] | None = None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """See `MultiNodeOptimizer.step`. *Collective.*"""
        if closure is None or self._needs_closure:
            return super().step(closure)
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        self._meet_scaler()
        return False

    @property
    def is_replaced(self) -> bool:
        """Whether a later optimizer has taken its parameters over."""
        return bool(self._taken_over_by)

    @property
    def counts_samples(self) -> bool:
        """Whether means or blocks depend on the number of samples."""
        return self.sample_weights.are_counted

    @property
    def _needs_closure(self) -> bool:
        closure = inspect.signature(self.inner.step).parameters.get("closure")
        return closure is not None and closure.default is inspect.Parameter.empty

    def state_dict(self) -> dict[str, Any]:
        """See `MultiNodeOptimizer.state_dict`."""
        return super().state_dict() if self.prepared_state is None else self.prepared_state

    def gathered_state_dict(self) -> dict[str, Any]:
        """The states of all ranks in one, on rank 0; other ranks get their own. *Collective.*"""
        state = super().state_dict()
        comm = self.communicator
        # Under local updates ranks differ in all of the state, else in what torchmn adds at most.
        own: dict[str, Any] = {}
        if self.schedule.traits.replica_consistency != "per_step":
            own = state
        elif (
            self.reducer.codec is not None
            or self.reducer.local_passes.may_exist
            or not isinstance(self.schedule, EveryStep)
        ):
            own = {"torchmn": state["torchmn"]}
        ranks = comm.gather_obj(own) if own else [{}] * comm.size
        return state if ranks is None else {**state, RANKS: ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `MultiNodeOptimizer.load_state_dict`; accepts the states of any number of ranks."""
        shared = dict(state_dict)
        ranks = cast(list[dict[str, Any]] | None, shared.pop(RANKS, None))
        if ranks is not None:
            comm = self.communicator
            states = [{**shared, **own} for own in ranks]
            is_same = len(states) == comm.size
            shared = states[comm.rank] if is_same else self.reshard_state_dict(states, comm)
        super().load_state_dict(shared)
