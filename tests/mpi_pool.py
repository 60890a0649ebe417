"""Ranks as MPI processes: started once by mpirun, then reused by many tests."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.limits import limit
from torchmn.cluster import Topology
from torchmn.errors import LaunchError, TorchmnError
from torchmn.run.backend import SESSION_VARIABLE, find_mpirun

_START_S = limit(60.0)


class MpiPool:
    """``size`` MPI processes that run functions, in worlds of up to ``size`` ranks.

    Use it as a context manager. Functions must be importable: they are sent by name.
    ``search_path`` is where the processes find this module and the functions.
    """

    def __init__(self, size: int, *, search_path: str) -> None:
        mpirun = find_mpirun(os.environ)
        if mpirun is None:
            raise LaunchError("No mpirun was found. Install one with: pip install 'torchmn[mpi]'.")
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="torchmn-pool-")
        address = str(Path(self._folder.name) / "socket")
        self._listener = Listener(address, family="AF_UNIX")
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        env.setdefault("OMPI_MCA_btl", "^ofi")  # saves a second of probing libfabric
        env.setdefault(SESSION_VARIABLE, self._folder.name)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [search_path, env.get("PYTHONPATH")]))
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self._process = subprocess.Popen(
            [mpirun, "-n", str(size), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
            + [sys.executable, "-m", "tests.mpi_pool", address],
            env=env,
            stdin=subprocess.DEVNULL,
        )
        self._connection = self._accept()
        self._num_tasks = 0

    def _accept(self) -> Connection:
        self._listener._listener._socket.settimeout(_START_S)  # type: ignore[attr-defined]
        try:
            return self._listener.accept()
        except OSError as error:
            self.close()
            raise LaunchError(f"The MPI pool did not start within {_START_S:g} s.") from error

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        name: str = "flat",
        topology: Topology | None = None,
        timeout_s: float = 20,
    ) -> list[Any]:
        """Call ``function(comm, *args)`` on ranks 0..world_size-1; results in rank order.

        Raises the error of the lowest rank that failed.
        """
        if world_size > self.size:
            raise LaunchError(
                f"The pool has {self.size} processes, but {world_size} were requested."
            )
        options = {
            "name": name,
            "topology": topology or Topology(("localhost",) * world_size),
            "timeout_s": timeout_s,
        }
        reference = (function.__module__, function.__qualname__)
        self._connection.send((reference, world_size, args, options))
        self._num_tasks += 1
        number, outcomes = 0, []
        while number < self._num_tasks:  # of a task whose test was ended, nobody has received any
            number, outcomes = self._connection.recv()
        for outcome in outcomes:
            if isinstance(outcome, _Failure):
                raise outcome.error
        return list(outcomes)

    def close(self) -> None:
        """End the processes."""
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.send(None)
            connection.close()
        try:
            self._process.wait(timeout=limit(10))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.close()
        self._folder.cleanup()

    def __enter__(self) -> MpiPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        try:
            pickle.loads(pickle.dumps(error))
            self.error = error
        except Exception:  # an error that cannot be pickled keeps its message
            self.error = TorchmnError(f"{type(error).__name__}: {error}")


def _resolve(module: str, qualname: str) -> Any:
    from importlib import import_module

    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _worker(address: str) -> None:
    """Run tasks, which rank 0 receives from the socket, on all ranks until None is received."""
    from multiprocessing.connection import Client

    import torch

    from torchmn.comm import create_communicator
    from torchmn.comm.transports import base, mpi
    from torchmn.comm.transports.base import TimeLimit
    from torchmn.comm.transports.mpi import MpiTransport, load_mpi
    from torchmn.comm.transports.tcp import TcpTransport

    torch.set_num_threads(1)
    comm = load_mpi().COMM_WORLD
    if comm.Get_size() > len(os.sched_getaffinity(0)):
        # A rank that spins takes the core of the rank that it waits for.
        mpi._POLLS_BEFORE_YIELD = 20
        base._EAGER_S = 0.0
    connection = Client(address, family="AF_UNIX") if comm.Get_rank() == 0 else None
    world = MpiTransport.world(_START_S)
    num_tasks = 0
    while True:
        task = _next_task(comm, connection)
        if task is None:
            return
        (module, qualname), world_size, args, options = task
        num_tasks += 1
        outcome: Any = None
        if world.rank < world_size:
            try:
                limit = TimeLimit(options["timeout_s"])
                transport = world.split(range(world_size), f"task{num_tasks}", limit)
                if len(options["topology"].nodes) > 1:  # as between hosts with Ethernet
                    transport = TcpTransport.connect(transport, limit)
                own = create_communicator(transport=transport, **options)
                try:
                    outcome = _resolve(module, qualname)(own, *args)
                finally:
                    own.finalize()
            except BaseException as error:  # reported to the test
                outcome = _Failure(error)
        outcomes = _gather(comm, outcome)
        if connection is not None:
            connection.send((num_tasks, outcomes[:world_size]))


def _next_task(comm: Any, connection: Connection | None) -> Any:
    """Receive the next task on every rank. Ranks sleep up to 20 ms at a time while waiting."""
    if connection is not None:
        task = pickle.dumps(connection.recv())
        requests = [comm.isend(task, peer, 7) for peer in range(1, comm.Get_size())]
        for request in requests:
            request.wait()
        return pickle.loads(task)
    pause_s = 0.0005
    while not comm.Iprobe(0, 7):
        time.sleep(pause_s)
        pause_s = min(1.05 * pause_s, 0.02)
    return pickle.loads(comm.recv(source=0, tag=7))


def _gather(comm: Any, outcome: Any) -> list[Any]:
    if comm.Get_rank() != 0:
        comm.send(outcome, 0, 8)
        return []
    outcomes = [outcome]
    for peer in range(1, comm.Get_size()):
        while not comm.Iprobe(peer, 8):
            time.sleep(0.0005)
        outcomes.append(comm.recv(source=peer, tag=8))
    return outcomes


if __name__ == "__main__":
    # Tasks refer to this module by its name, so its classes must come from it as well.
    from tests import mpi_pool

    mpi_pool._worker(sys.argv[1])
