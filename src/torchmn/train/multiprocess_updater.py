"""Several devices of one machine from one plain script, without a launcher.

    on every rank:   g_i <- gradient of the mean loss of its own batch of n_i samples
                     g   <- sum of n_i g_i / sum of n_i
    on rank 0 only:  the optimizer's step, and with it weight decay and momentum
    from rank 0:     parameters

This process is rank 0 and holds the *main* device; `start_local_ranks` starts the other ranks, the
workers. Chainer's MultiprocessParallelUpdater computes the same, but sums the gradients and divides
the learning rate by the number of devices instead, which makes weight decay weaker.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pytorch_pfn_extras import reporting
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import (
    CommunicationError,
    LaunchError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from torchmn.base.torch_private import TCPStore
from torchmn.cluster.cpus import assign_cpus, available_processors
from torchmn.comm.transports.join import serve_store
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.replicas import named_parameters
from torchmn.run.local_ranks import LocalRanks, raise_if_imported_by_rank, start_local_ranks
from torchmn.train.batch_source import batch_source
from torchmn.train.evaluation import Ratio
from torchmn.train.standard_updater import StandardUpdater
from torchmn.train.updater_replica import MAIN, Order, Replica, run_worker

_START_LIMIT_S = 300.0
_REPORT_LIMIT_S = 5.0
_END_LIMIT_S = 10.0


class MultiprocessParallelUpdater(StandardUpdater):
    """One rank per device: mean gradients, a step on main, parameters from main to the others.

    It starts the other ranks itself, at the first update, so it is used in an ordinary script
    whose work is under ``if __name__ == "__main__":``. Model, loss function and iterators are sent
    to them and must be picklable. Gradients are means over the samples of all ranks; learning
    rate, eps and weight decay are never rewritten. Epochs are those of main's iterator.

    Each rank has its own running statistics; those of main are evaluated and saved.

    Args:
        iterators: one per device, main's first, over parts of equal length
            (`torchmn.split_dataset_n_random`).
        optimizer: a plain optimizer over parameters of ``model``. It steps on main only.
        model: moved to main's device; called with a batch, it returns the loss.
        devices: ``{"main": 0, "gpu1": 1}`` or a list, main first; GPU numbers, ``"cuda:1"`` or
            ``"cpu"``, all of one kind.
        loss_func: called in place of the model.
        timeout_s: the time limit of one exchange in seconds.

    Raises UsageError, UnsupportedError: the arguments do not fit together.

    `update` also raises LaunchError: a rank did not start; PeerLostError: a rank ended or raised
    an exception, with the launcher's report.

    >>> model = torchmn.train.Classifier(torch.nn.Linear(3, 2))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> halves = torchmn.split_dataset_n_random([(torch.ones(3), 1)] * 8, 2)
    >>> iterators = [torchmn.SerialIterator(half, 2) for half in halves]
    >>> updater = torchmn.MultiprocessParallelUpdater(
    ...     iterators, sgd, model, devices=["cpu", "cpu"]
    ... )
    >>> torchmn.Trainer(updater, (1, "epoch"), out=None).run()
    >>> updater.iteration
    2
    """

    def __init__(
        self,
        iterators: Sequence[Any],
        optimizer: Optimizer,
        model: nn.Module,
        *,
        devices: Mapping[str, Device] | Sequence[Device],
        loss_func: Callable[..., Tensor] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        raise_if_imported_by_rank()
        self.devices = named_devices(devices)
        _raise_if_parts_differ(iterators, self.devices)
        if isinstance(optimizer, MultiNodeOptimizer):
            raise UsageError(
                "MultiprocessParallelUpdater exchanges gradients itself. Give it the plain "
                "optimizer, not that of create_multi_node_optimizer."
            )
        named_parameters(optimizer, [model])  # rejects parameters that are not in the model
        main = self.devices["main"]
        super().__init__(iterators[0], optimizer, model.to(main), loss_func=loss_func, device=main)
        self.timeout_s = timeout_s
        self._sources = [self.source, *map(batch_source, iterators[1:])]
        self._workers: LocalRanks | None = None
        self._replica: Replica | None = None
        self._has_ended = self._has_failed = False
        self._random_states: dict[int, Any] = {}
        """Random states of the workers by rank, as they were saved."""
        self._num_threads_before = 0

    def update(self) -> None:
        """Do one iteration on all devices.

        Raises UsageError: it has ended; LaunchError, PeerLostError: see the class.
        """
        self.setup_workers()
        if self._replica is None:
            raise UsageError("This updater has ended. Make a new one to train again.")
        with self._report_of_failure():
            self._replica.control.bcast_obj("update", MAIN)
            sums = self._replica.update(self.optimizer)
        means: dict[str, Any] = {  # what each rank reported once is a number
            name: total / weight if weight == len(self.devices) else Ratio(total, weight)
            for name, (total, weight) in sums.items()
        }
        reporting.report(means)
        self.iteration += 1

    def setup_workers(self) -> None:
        """Start the other ranks if they are not running yet.

        Raises UsageError: something cannot be pickled; LaunchError: a rank did not start.
        """
        if self._replica is not None or self._has_ended:
            return
        # Bound before the store is made, so that no other process can take the port.
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        store = serve_store(listener, "127.0.0.1", timeout_s=self.timeout_s)
        secret = secrets.token_bytes(32)
        orders = [self._order(rank, store.port, secret) for rank in range(len(self.devices))]
        is_cpu = self.devices["main"].type == "cpu"
        processors = available_processors()
        own = assign_cpus(processors, intra_rank=MAIN, intra_size=len(orders))
        self._has_ended = self._has_failed = True  # until all ranks have joined
        atexit.register(self.finalize)
        if is_cpu:
            self._num_threads_before = torch.get_num_threads()
            torch.set_num_threads(own.num_threads)
        if orders[1:]:
            self._workers = start_local_ranks(
                run_worker,
                [(order,) for order in orders[1:]],
                backend="gloo" if is_cpu else "nccl",
                cores=set(processors.logical) - set(own.cores),
            )
            self._wait_for_start(self._workers, store)
        with self._report_of_failure():
            self._replica = Replica(orders[MAIN], store, self.model, self.loss_func, self.source)
            self._load_into_workers(self._replica)
        self._has_ended = self._has_failed = False

    def finalize(self) -> None:
        """End the other ranks, at once if something has failed."""
        atexit.unregister(self.finalize)
        replica, self._replica = self._replica, None
        workers, self._workers = self._workers, None
        if replica is not None:
            # After a failure workers may not listen any more: `workers.end` then ends them.
            with contextlib.suppress(CommunicationError):
                if not self._has_failed:
                    replica.control.bcast_obj("end", MAIN)
            replica.finalize()
        if workers is not None:
            workers.end(0.0 if self._has_failed else _END_LIMIT_S)
        self._has_ended = True
        if self._num_threads_before:
            torch.set_num_threads(self._num_threads_before)
            self._num_threads_before = 0

    def state_dict(self) -> dict[str, Any]:
        """The iteration, the states of all iterators and the random states of the workers.

        Random generators of main belong to the script.
        """
        states = [dict(source.state_dict()) for source in self._sources]
        random_states = dict(self._random_states)
        if self._replica is not None:
            self._replica.control.bcast_obj("state", MAIN)
            gathered: list[Any] = self._replica.control.gather_obj(None, MAIN) or []
            for rank in range(1, len(gathered)):
                states[rank], random_states[rank] = gathered[rank]
        return {"iteration": self.iteration, "sources": states, "random_states": random_states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, to resume with the very next batches.

        Raises UsageError: it was saved with another number of devices.
        """
        states = state["sources"]
        if len(states) != len(self._sources):
            raise UsageError(
                f"The state was saved with {len(states)} devices, and there are "
                f"{len(self._sources)} now. Use as many devices as before."
            )
        self.iteration = int(state["iteration"])
        self._random_states = dict(state["random_states"])
        for source, saved in zip(self._sources, states, strict=True):
            source.load_state_dict(saved)
        if self._replica is not None:
            self._load_into_workers(self._replica)

    # ---- inside ----

    def _order(self, rank: int, port: int, secret: bytes) -> Order:
        return Order(
            rank=rank,
            size=len(self.devices),
            device=list(self.devices.values())[rank],
            port=port,
            secret=secret,
            timeout_s=self.timeout_s,
            seed=(torch.initial_seed() + rank) % 2**63,
            payload=b"" if rank == MAIN else self._pickled(rank),
        )

    def _pickled(self, rank: int) -> bytes:
        """Model, loss function and iterator, with all tensors on the CPU."""
        try:
            # `cpu()` moves a model in place. Copied together, for the function may hold the model.
            model, loss_func = copy.deepcopy((self.model, self.loss_func))
            return pickle.dumps((model.cpu(), loss_func, self._sources[rank]))
        except Exception as error:
            raise UsageError(
                "The model, the loss function and the iterators are sent to the worker ranks and "
                f"must be picklable: {type(error).__name__}: {error}. Use classes and functions of "
                "a module in place of lambdas, local functions, open files and threads."
            ) from error

    def _wait_for_start(self, workers: LocalRanks, store: TCPStore) -> None:
        """Wait until all workers run.

        Raises LaunchError: they ended, or took too long to load their model and data.
        """
        begin_s = time.monotonic()
        while not store.check([f"started{rank}" for rank in range(1, len(self.devices))]):
            is_late = time.monotonic() > begin_s + _START_LIMIT_S
            if is_late or workers.have_ended:
                raise LaunchError(
                    f"The workers did not start within {_START_LIMIT_S:g} s. See what the script "
                    "does when it is imported."
                    if is_late
                    else f"The workers did not start. {workers.failure(0.0)}"
                )
            time.sleep(0.02)

    @contextlib.contextmanager
    def _report_of_failure(self) -> Iterator[None]:
        """Replace the error that a worker was lost by the launcher's report of why it ended."""
        try:
            yield
        except CommunicationError:
            self._has_failed = True
            report = self._workers.failure(_REPORT_LIMIT_S) if self._workers else ""
            if not report:
                raise
            ranks = [
                f"rank {rank} is '{name}' on {device}"
                for rank, (name, device) in enumerate(list(self.devices.items())[1:])
            ]
            raise PeerLostError(f"A worker failed ({', '.join(ranks)}). {report}") from None
        except BaseException:
            self._has_failed = True
            raise

    def _load_into_workers(self, replica: Replica) -> None:
        states = [dict(source.state_dict()) for source in self._sources]
        replica.control.bcast_obj("load", MAIN)
        replica.control.bcast_obj((states, self._random_states), MAIN)


def _raise_if_parts_differ(iterators: Sequence[Any], devices: Mapping[str, torch.device]) -> None:
    if len(iterators) != len(devices):
        raise UsageError(
            f"There are {len(iterators)} iterators for {len(devices)} devices. Give one for each, "
            "main's first."
        )
    datasets = [getattr(iterator, "dataset", ()) for iterator in iterators]
    lengths = [len(dataset) for dataset in datasets if hasattr(dataset, "__len__")]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"The iterators' data sets have {lengths} samples. They must be equal, so "
            "that all devices end their epochs together: split them with "
            "torchmn.split_dataset_n_random."
        )


Device = int | str | torch.device


def named_devices(devices: Mapping[str, Device] | Sequence[Device]) -> dict[str, torch.device]:
    """Devices by name, main first. Raises UsageError, UnsupportedError: they cannot be combined."""
    named = devices
    if not isinstance(named, Mapping):
        named = {("main" if i == 0 else f"gpu{i}"): device for i, device in enumerate(named)}
    if "main" not in named:
        raise UsageError(
            f"devices={devices!r} must be a dict with 'main', the device that steps the optimizer, "
            "or a list with main first."
        )
    found = {name: _device(device) for name, device in {"main": named["main"], **named}.items()}
    kinds = {device.type for device in found.values()}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise UnsupportedError(
            f"devices are {', '.join(map(str, found.values()))}. All must be GPUs or all CPUs."
        )
    gpus = [device.index for device in found.values() if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise UnsupportedError(f"GPUs {gpus}: NCCL needs one rank per GPU. Name each GPU once.")
    return found


def _device(device: Device) -> torch.device:
    if isinstance(device, int):
        return torch.device("cpu") if device < 0 else torch.device("cuda", device)
    found = torch.device(device)
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found
