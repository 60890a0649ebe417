"""Several devices of one machine from one plain script, without a launcher."""

from __future__ import annotations

import copy
import multiprocessing.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.errors import CommunicationError, UnknownNameError, UnsupportedError, UsageError
from torchmn.gradients.replicas import named_parameters
from torchmn.optimizer import MultiNodeOptimizer
from torchmn.topology import Topology
from torchmn.topology.cpus import assign_cpus, available_processors
from torchmn.training.batch_source import batch_source, iterations_per_epoch
from torchmn.training.log_report import OBSERVATIONS, Observations
from torchmn.training.replica import Replica, report_sums
from torchmn.training.worker_process import (
    Worker,
    WorkerPlan,
    end_workers,
    exit_if_script_has_no_guard,
    explanation,
    join,
    serve_store,
    start_workers,
)

Device = int | str | torch.device


class MultiprocessParallelUpdater:
    """One process per device: gradients to main, step on main, parameters back.

    It starts the other processes itself, at the first update, so it is used in an ordinary script
    whose work stands under ``if __name__ == "__main__":``. Model, loss function and iterators
    travel to them and must be picklable. Gradients are means over the samples of all processes;
    learning rate, eps and weight decay are never rewritten (Chainer's updater sums gradients and
    divides them, ancestors 3.3). Epochs are those of main's iterator.

    Each process has running statistics of its own; those of main are evaluated and saved.

    Args:
        iterators: one per device, main's first, over parts of equal length
            (`torchmn.split_dataset_n_random`).
        optimizer: any ordinary one, over parameters of ``model``. It steps on main only.
        model: is moved to main's device; called with a batch it returns the loss.
        devices: ``{"main": 0, "gpu1": 1}`` or a list, main first; GPU numbers, ``"cuda:1"`` or
            ``"cpu"``, all of one kind.
        loss_func: is called in place of the model.
        observations: what ``main/...`` is: the ``mean`` over all processes, or main's only with
            ``rank0``, as in Chainer.
        timeout_s: limit of one exchange.

    Raises UsageError, UnsupportedError: the arguments do not fit together.

    `update` also raises LaunchError: a worker did not start; PeerLostError: a worker died or
    raised, with what it said.
    """

    def __init__(
        self,
        iterators: Sequence[Any],
        optimizer: Optimizer,
        model: nn.Module,
        *,
        devices: Mapping[str, Device] | Sequence[Device],
        loss_func: Callable[..., Tensor] | None = None,
        observations: Observations = "mean",
        timeout_s: float = 60.0,
    ) -> None:
        exit_if_script_has_no_guard()
        self.devices = _named_devices(devices)
        _raise_if_parts_differ(iterators, self.devices)
        if isinstance(optimizer, MultiNodeOptimizer):
            raise UsageError(
                "MultiprocessParallelUpdater exchanges gradients itself. Give it the plain "
                "optimizer, not that of create_multi_node_optimizer."
            )
        if observations not in OBSERVATIONS:
            raise UnknownNameError("choice of observations", observations, OBSERVATIONS)
        named_parameters(optimizer, [model])  # refuses what is not in the model
        self.optimizer = optimizer
        self.model = model.to(self.devices["main"])
        self.loss_func = loss_func
        self.observations = observations
        self.timeout_s = timeout_s
        self.iteration = 0
        self._sources = [batch_source(iterator) for iterator in iterators]
        self._workers: list[Worker] = []
        self._replica: Replica | None = None
        self._store: Any = None
        self._is_sound = True
        self._random_states: dict[int, list[Tensor]] = {}
        """Of workers, by rank, as they were saved."""
        self._num_threads_before: int | None = None
        self._at_exit: multiprocessing.util.Finalize | None = None

    # ---- where training is ----

    @property
    def epoch(self) -> int:
        """Epochs done, of main's iterator."""
        return self._sources[0].epoch

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self._sources[0].epoch_detail

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last iteration; None before the first."""
        return self._sources[0].previous_epoch_detail

    @property
    def iterations_per_epoch(self) -> Fraction | None:
        """The mean number of iterations in an epoch; None if it is not known."""
        return iterations_per_epoch(self._sources[0])

    # ---- what is done ----

    def update(self) -> None:
        """Do one iteration on all devices."""
        self.setup_workers()
        replica = self._replica
        if replica is None:
            raise UsageError("This updater has ended. Make a new one to train again.")
        try:
            for worker in self._workers:
                worker.tell("update")
            sums = replica.gradients_to_main()
            self.optimizer.step()
            replica.parameters_from_main()
        except CommunicationError as error:
            self._is_sound = False
            reason = explanation(self._workers, error)
            raise reason from (None if reason is not error else error.__cause__)
        except BaseException:
            self._is_sound = False
            raise
        report_sums(sums, len(self.devices) if self.observations == "mean" else 1)
        self.iteration += 1

    def setup_workers(self) -> None:
        """Start the processes, if they are not there yet.

        Raises UsageError: something cannot be pickled; LaunchError: a worker did not start.
        """
        if self._replica is not None or not self._is_sound:
            return
        self._is_sound = False  # until all is there
        self._num_threads_before = torch.get_num_threads()
        self._store = serve_store(self.timeout_s)
        plans = [self._plan(rank) for rank in range(len(self.devices))]
        self._workers = start_workers(plans[1:])
        self._tell_random_states()
        # Before multiprocessing waits for its processes at the end of the script.
        self._at_exit = multiprocessing.util.Finalize(None, self.finalize, exitpriority=100)
        torch.set_num_threads(plans[0].num_threads)
        try:
            comm = join(self._store, plans[0])
            loss_func = self.model if self.loss_func is None else self.loss_func
            self._replica = Replica(
                comm,
                self.model,
                loss_func,
                self._sources[0],
                plans[0].device,
                observes=True,
            )
        except CommunicationError as error:
            raise explanation(self._workers, error) from None
        self._is_sound = True

    def finalize(self) -> None:
        """End the processes; at once if something has failed."""
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        workers, self._workers = self._workers, []
        end_workers(workers, is_orderly=self._is_sound)
        if self._replica is not None:
            self._replica.comm.finalize()
            self._replica = None
        self._store = None
        self._is_sound = False
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)
            self._num_threads_before = None

    def state_dict(self) -> dict[str, Any]:
        """The iteration, the places of all iterators, also in the middle of an epoch, and the
        random numbers of the workers; those of main belong to the script.
        """
        states = [dict(source.state_dict()) for source in self._sources]
        random_states = dict(self._random_states)
        for worker in self._workers:
            worker.tell("get state")
            states[worker.plan.rank], random_states[worker.plan.rank] = worker.hear()
        return {"iteration": self.iteration, "sources": states, "random_states": random_states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the very next batches.

        On another number of devices with as many samples of the epoch done as there were; which
        ones they are is not kept. Raises UsageError: an iterator cannot do that.
        """
        states = state["sources"]
        is_same = len(states) == len(self._sources)
        if not is_same:
            states = self._shared_out(states)
        self.iteration = int(state["iteration"])
        self._random_states = dict(state.get("random_states", {})) if is_same else {}
        for source, saved in zip(self._sources, states, strict=True):
            source.load_state_dict(saved)
        for worker in self._workers:
            worker.tell("set state", states[worker.plan.rank])
        self._tell_random_states()

    # ---- inside ----

    def _shared_out(self, states: Sequence[Any]) -> list[Any]:
        """One state for each iterator, of those of another number of devices."""
        size = len(self._sources)
        topology = Topology(("localhost",) * size)
        reshards = [getattr(source, "reshard_state_dict", None) for source in self._sources]
        if None in reshards:
            raise UsageError(
                f"The state was saved with {len(states)} devices, here are {size}. Give as many, "
                "or iterators that can share out their places: SerialIterator or a DataLoader."
            )
        return [
            reshard(states, topology.place(rank))
            for rank, reshard in enumerate(reshards)
            if reshard is not None
        ]

    def _tell_random_states(self) -> None:
        for worker in self._workers:
            if worker.plan.rank in self._random_states:
                worker.tell("set random states", self._random_states[worker.plan.rank])

    def _plan(self, rank: int) -> WorkerPlan:
        name, device = list(self.devices.items())[rank]
        share = assign_cpus(available_processors(), intra_rank=rank, intra_size=len(self.devices))
        is_cpu = device.type == "cpu"
        return WorkerPlan(
            name=name,
            rank=rank,
            size=len(self.devices),
            device=device,
            num_threads=share.num_threads if is_cpu else torch.get_num_threads(),
            seed=(torch.initial_seed() + rank) % 2**63,
            port=self._store.port,
            timeout_s=self.timeout_s,
            observes=self.observations == "mean",
            payload=self._pickled(rank) if rank else b"",
        )

    def _pickled(self, rank: int) -> bytes:
        """Model, loss function and iterator by value: without shared memory, and on the CPU."""
        parts = {"model": self.model, "loss_func": self.loss_func, "iterator": self._sources[rank]}
        try:
            model, loss_func = copy.deepcopy((self.model, self.loss_func))
            model.cpu()
            return pickle.dumps(
                (model, model if loss_func is None else loss_func, parts["iterator"])
            )
        except Exception as error:
            raise UsageError(_pickle_problem(parts, error)) from error


def _pickle_problem(parts: Mapping[str, object], error: Exception) -> str:
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as reason:
            return (
                f"The {name} (a {type(part).__name__}) cannot travel to the worker processes: "
                f"{type(reason).__name__}: {reason}. It must be picklable: use classes and "
                "functions of a module in place of lambdas, local functions, open files and "
                "threads."
            )
    return f"The model cannot be copied for the worker processes: {type(error).__name__}: {error}"


def _named_devices(devices: Mapping[str, Device] | Sequence[Device]) -> dict[str, torch.device]:
    if isinstance(devices, Mapping):
        if "main" not in devices:
            raise UsageError(
                f"devices has the keys {', '.join(map(repr, devices))}. One must be 'main': the "
                "device that steps the optimizer."
            )
        named = {"main": devices["main"], **devices}
    elif isinstance(devices, (list, tuple)) and devices:
        named = {("main" if i == 0 else f"gpu{i}"): device for i, device in enumerate(devices)}
    else:
        raise UsageError(
            f"devices={devices!r} should be a dict with 'main', or a list with main first."
        )
    found = {name: _device(device) for name, device in named.items()}
    kinds = {device.type for device in found.values()}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise UnsupportedError(
            f"devices are {', '.join(map(str, found.values()))}. All must be GPUs or all CPUs."
        )
    gpus = [device.index for device in found.values() if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise UnsupportedError(f"GPUs {gpus}: NCCL wants one process per GPU. Name each once.")
    num_gpus = torch.cuda.device_count() if gpus else 0
    if gpus and max(gpus) >= num_gpus:
        raise UsageError(f"There is no GPU {max(gpus)}: this machine shows {num_gpus}.")
    return found


def _device(device: Device) -> torch.device:
    if isinstance(device, int):
        return torch.device("cpu") if device < 0 else torch.device("cuda", device)
    found = torch.device(device)
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found


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
            f"The iterators' data sets have {lengths} samples. They must be equal, else the "
            "devices would not end their epochs together: cut them with "
            "torchmn.split_dataset_n_random."
        )
