"""The worker processes of `MultiprocessParallelUpdater`, from both sides.

Main tells a worker what to do through a pipe, on which it waits without a limit, since main may
evaluate or write between two updates; the pipe's end tells it that main is gone. Within an update
they meet in collectives, which have a time limit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from torchmn.communicators import ROUTES, Communicator
from torchmn.communicators.object_codec import Trust
from torchmn.errors import CommunicationError, LaunchError, PeerLostError, TorchmnError
from torchmn.topology import Topology
from torchmn.training.replica import Replica
from torchmn.transports.gloo_nccl import TorchDistributedTransport

NO_GUARD_EXIT_CODE = 87
_START_LIMIT_S = 300.0
_END_LIMIT_S = 5.0
_HEAR_LIMIT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What a worker needs to know to begin."""

    name: str
    rank: int
    size: int
    device: torch.device
    num_threads: int
    seed: int
    """Of the default random generator: dropout differs between processes."""
    port: int
    timeout_s: float
    observes: bool
    payload: bytes
    """Pickled (model, loss function, source of batches)."""


def join(store: Store, plan: WorkerPlan) -> Communicator:
    """The communicator of main and its workers. *Collective.*"""
    transport = TorchDistributedTransport(
        store,
        plan.rank,
        plan.size,
        timeout_s=plan.timeout_s,
        cuda_device=plan.device if plan.device.type == "cuda" else None,
    )
    return ROUTES["flat"](
        transport,
        Topology(("localhost",) * plan.size),
        device=plan.device,
        timeout_s=plan.timeout_s,
        trust=Trust(),
    )


def serve_store(timeout_s: float) -> TCPStore:
    """Where main and workers find each other: a free port of this machine that main listens on."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        master_listen_fd=listener.detach(),  # else torch listens on all interfaces
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def exit_if_script_has_no_guard() -> None:
    """End quietly where a worker that is being started runs the script anew: main explains why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(NO_GUARD_EXIT_CODE)


# ---- in the worker ----


def worker_main(plan: WorkerPlan, pipe: Connection) -> None:
    """The life of a worker. It prints nothing: what goes wrong is told to main."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches main, which ends us
    try:
        _work(plan, pipe)
    except EOFError:
        sys.exit(1)  # main is gone
    except BaseException as error:
        message = _Failure(
            sentence=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            is_own=not isinstance(error, CommunicationError),
        )
        with contextlib.suppress(OSError):
            pipe.send(("failed", message))
        sys.exit(1)


def _work(plan: WorkerPlan, pipe: Connection) -> None:
    torch.manual_seed(plan.seed)
    torch.set_num_threads(plan.num_threads)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)  # before any tensor, so that no context lands elsewhere
    pipe.send(("listening", None))
    _, payload = pipe.recv()
    model, loss_func, source = pickle.loads(payload)
    pipe.send(("ready", None))
    store = TCPStore("127.0.0.1", plan.port, is_master=False, wait_for_workers=False)
    comm = join(store, plan)
    replica = Replica(
        comm, model.to(plan.device), loss_func, source, plan.device, observes=plan.observes
    )
    while True:
        command, value = pipe.recv()
        if command == "update":
            replica.gradients_to_main()
            replica.parameters_from_main()
        elif command == "get state":
            pipe.send(("state", (dict(source.state_dict()), _random_states(plan.device))))
        elif command == "set state":
            source.load_state_dict(value)
        elif command == "set random states":
            _set_random_states(value, plan.device)
        else:
            comm.finalize()
            return


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the default generators that dropout uses."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


@dataclass(frozen=True)
class _Failure:
    sentence: str
    traceback: str
    is_own: bool
    """Whether it is the cause, and not the loss of another process."""


# ---- in main ----


class Worker:
    """One worker process, as main sees it."""

    def __init__(self, plan: WorkerPlan) -> None:
        context = multiprocessing.get_context("spawn")
        self.plan = plan
        self.pipe, theirs = context.Pipe()
        # Without the payload: multiprocessing writes the arguments into a pipe that it holds open
        # itself, and would wait for ever if the worker ended without reading more than fits in.
        arguments = (replace(plan, payload=b""), theirs)
        self.process: SpawnProcess = context.Process(
            target=worker_main, args=arguments, name=plan.name
        )
        self.process.start()
        theirs.close()
        self.failure: _Failure | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"Worker '{self.plan.name}' (process {self.process.pid}, device {self.plan.device})"

    def tell(self, command: str, value: object = None) -> None:
        """Give a command. Raises PeerLostError: the worker is gone."""
        try:
            self.pipe.send((command, value))
        except OSError as error:
            raise PeerLostError(f"{self.label} is gone ({error}).") from error

    def take_part_in_start(self) -> bool:
        """Hear what it says while it starts, and answer; whether it is ready.

        Raises PeerLostError: the worker failed or is gone.
        """
        if self._hear()[0] == "ready":
            return True
        self.tell("payload", self.plan.payload)
        return False

    def hear(self) -> Any:
        """The answer to a command. Raises PeerLostError: the worker failed or is gone."""
        return self._hear()[1]

    def _hear(self) -> tuple[str, Any]:
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerLostError(f"{self.label} is gone.") from error
        if kind == "failed":
            self.failure = value
            raise PeerLostError(f"{self.label} raised {value.sentence}")
        return kind, value

    def listen_for_failure(self, limit_s: float) -> None:
        """Wait until the worker has said what failed, or has ended, or the time is over."""
        with contextlib.suppress(PeerLostError):
            deadline = time.monotonic() + limit_s
            while self.failure is None and self.pipe.poll(max(0.0, deadline - time.monotonic())):
                self.hear()
        self.process.join(0.2)

    def describe_end(self) -> str | None:
        """What is known of a worker that failed; None if nothing is wrong with it."""
        if self.failure is not None and self.failure.is_own:
            return (
                f"{self.label} raised {self.failure.sentence}. Its traceback:\n"
                f"{self.failure.traceback}"
            )
        code = self.process.exitcode
        if code is None or self.failure is not None:
            return None
        if code == NO_GUARD_EXIT_CODE:
            script = getattr(sys.modules["__main__"], "__file__", "the script")
            return (
                f"Workers run {script} anew when they start, and it would train again there. Put "
                "what it does into a function main() and call it under "
                'if __name__ == "__main__":'
            )
        how = (
            f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited ({code})"
        )
        return f"{self.label} {how}."

    def end(self, limit_s: float) -> None:
        """Wait for its end, then enforce it."""
        self.process.join(limit_s)
        for force in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                force()
                self.process.join(1.0)
        self.pipe.close()


def start_workers(plans: Sequence[WorkerPlan]) -> list[Worker]:
    """Start all and wait until each has taken its model and iterator.

    Raises LaunchError: one did not start; none is left.
    """
    workers: list[Worker] = []
    try:
        for plan in plans:
            workers.append(Worker(plan))
        deadline = time.monotonic() + _START_LIMIT_S
        waiting = list(workers)
        while waiting:
            ready = wait([w.pipe for w in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LaunchError(
                    f"{waiting[0].label} was not ready within {_START_LIMIT_S:g} s. See what the "
                    "script does when it is imported."
                )
            for worker in [w for w in waiting if w.pipe in ready]:
                if worker.take_part_in_start():
                    waiting.remove(worker)
    except BaseException as error:
        reason = explanation(workers, error)
        end_workers(workers, is_orderly=False)
        if isinstance(error, (PeerLostError, pickle.PicklingError)):
            raise LaunchError(str(reason)) from None
        raise
    return workers


def explanation(workers: Sequence[Worker], error: BaseException) -> TorchmnError | BaseException:
    """Why an exchange failed: what the first worker to blame says, else the error itself."""
    deadline = time.monotonic() + _HEAR_LIMIT_S
    while isinstance(error, CommunicationError):
        for worker in workers:
            worker.listen_for_failure(0.1)
        ends = [text for worker in workers if (text := worker.describe_end())]
        if ends:
            return PeerLostError(ends[0])
        if time.monotonic() > deadline:
            break
    return error


def end_workers(workers: Sequence[Worker], *, is_orderly: bool) -> None:
    """Let all end; ``is_orderly`` gives them the time to, else they are ended at once."""
    if is_orderly:
        for worker in workers:
            with contextlib.suppress(PeerLostError):
                worker.tell("end")
    for worker in workers:
        if not is_orderly:
            worker.process.terminate()
        worker.end(_END_LIMIT_S)
