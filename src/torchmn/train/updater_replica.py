"""The iteration of a MultiprocessParallelUpdater on each rank, and the loop of its workers."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_pfn_extras.reporting import Reporter
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.torch_private import PrefixStore, Store, TCPStore
from torchmn.cluster import Topology
from torchmn.comm import Communicator
from torchmn.comm.object_codec import Trust
from torchmn.comm.routes.flat import FlatRoute
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.data import rng_state
from torchmn.data.batch_size import num_samples
from torchmn.train.batch_source import BatchSource
from torchmn.train.evaluation import WeightedSums, batch_to, merge_sums
from torchmn.train.evaluation.sums import Sums, scalars_of
from torchmn.train.standard_updater import compute_gradients

MAIN = 0  # the rank that steps the optimizer
# Workers wait this long for a command: main may evaluate or write between two updates.
_NO_LIMIT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """The settings with which a rank starts; sent to workers."""

    rank: int
    size: int
    device: torch.device
    port: int  # of the store at which the ranks join
    secret: bytes
    timeout_s: float
    seed: int  # of the default random generator: dropout differs between ranks
    payload: bytes  # pickled (model, loss function, source of batches)


class Replica:
    """One rank of the updater. The constructor and all methods are *collective*."""

    def __init__(
        self,
        order: Order,
        store: Store,
        model: nn.Module,
        loss_func: Callable[..., Tensor],
        source: BatchSource,
    ) -> None:
        self._order = order
        self._model = model
        self._loss_func = loss_func
        self._source = source
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._reporter = Reporter()
        self._reporter.add_observer("main", model)
        self._reporter.add_observers("main", list(model.named_modules()))
        self._comm = self._join(PrefixStore("gradients", store), order.timeout_s)
        self.control = self._join(PrefixStore("control", store), _NO_LIMIT_S)
        self._comm.bcast_data(model)

    def _join(self, store: Store, timeout_s: float) -> Communicator:
        order = self._order
        transport = TorchDistributedTransport(
            store,
            order.rank,
            order.size,
            timeout_s=order.timeout_s,
            cuda_device=order.device if order.device.type == "cuda" else None,
        )
        return Communicator(
            FlatRoute,
            transport,
            Topology(("localhost",) * order.size),
            device=order.device,
            timeout_s=timeout_s,
            trust=Trust(secret=order.secret),
        )

    def update(self, optimizer: Optimizer | None) -> Sums:
        """Do one iteration; main passes its optimizer.

        Returns the sums of what the ranks reported, the same on all. Raises UsageError: the model
        did not return a loss.
        """
        for parameter in self._parameters:
            parameter.grad = None
        batch = next(self._source)
        num = num_samples(batch)
        observation: dict[str, Any] = {}
        if num != 0:
            with self._reporter.scope(observation):
                compute_gradients(self._loss_func, batch_to(batch, self._order.device))
        own = WeightedSums()
        for name, value in scalars_of(observation).items():
            own.add(name, value)
        weight = float(1 if num is None else num)
        has_gradient = bytes(parameter.grad is not None for parameter in self._parameters)
        gathered = self._comm.allgather_obj((weight, own.sums(), has_gradient))
        share = weight / (sum(weight for weight, _, _ in gathered) or 1.0)
        # The exchange divides by the number of ranks: with this factor the mean is over samples.
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(share * self._order.size)
        self._comm.multi_node_mean_grad(self._model, zero_fill=True)
        every_rank = zip(self._parameters, *(theirs for *_, theirs in gathered), strict=True)
        for parameter, *is_given in every_rank:
            if not any(is_given):  # on no rank: the optimizer must not decay it
                parameter.grad = None
        if optimizer is not None:
            optimizer.step()
        self._broadcast_parameters()
        return merge_sums([sums for _, sums, _ in gathered])

    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        """Give all ranks the parameters of main, one message per dtype."""
        for dtype in dict.fromkeys(p.dtype for p in self._parameters):
            group = [p for p in self._parameters if p.dtype == dtype]
            flat = self._comm.bcast(torch.cat([p.reshape(-1) for p in group]), MAIN)
            if self._order.rank != MAIN:
                for parameter, part in zip(
                    group, flat.split([p.numel() for p in group]), strict=True
                ):
                    parameter.copy_(part.view_as(parameter))

    def work(self) -> None:
        """Follow the commands of main until it ends. Called by workers."""
        while (command := self.control.bcast_obj(None, MAIN)) != "end":
            if command == "update":
                self.update(None)
            elif command == "state":
                random_state = rng_state.capture(self._order.device)
                self.control.gather_obj((dict(self._source.state_dict()), random_state), MAIN)
            elif command == "load":
                states, random_states = self.control.bcast_obj(None, MAIN)
                self._source.load_state_dict(states[self._order.rank])
                if self._order.rank in random_states:
                    rng_state.restore(random_states[self._order.rank], self._order.device)

    def finalize(self) -> None:
        """Close the connections."""
        self._comm.finalize()
        self.control.finalize()


def run_worker(order: Order) -> None:
    """Run as a worker until main ends it; called in the process of the worker."""
    if order.device.type == "cuda":
        torch.cuda.set_device(order.device)  # before any tensor: no context is made elsewhere
    torch.manual_seed(order.seed)
    model, loss_func, source = pickle.loads(order.payload)
    store = TCPStore("127.0.0.1", order.port, is_master=False, wait_for_workers=False)
    store.set(f"started{order.rank}", "")
    replica = Replica(order, store, model.to(order.device), loss_func, source)
    replica.work()
    replica.finalize()
