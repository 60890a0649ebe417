"""Ranks as threads, each with its own gloo group, for tests of torchmn and of code that uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from torchmn.base.torch_private import HashStore
from torchmn.cluster import Topology
from torchmn.comm import Communicator, RouteName, Timeout, create_communicator
from torchmn.comm.create import GradDtype
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.control.script import is_consequence

__all__ = ["run_ranks"]

Result = TypeVar("Result")


def run_ranks(
    function: Callable[[Communicator], Result],
    world_size: int,
    *,
    name: RouteName | Literal["auto"] = "flat",
    topology: Topology | None = None,
    timeout_s: float = 20,
    is_trusted: bool = True,
    allreduce_grad_dtype: GradDtype | None = None,
) -> list[Result]:
    """Call ``function(comm)`` on every rank, one thread each; results in rank order.

    Raises the first error, in order of time, that is not a consequence of another rank's, after all
    ranks have ended; a failure on one rank must end the others through the communicator. The
    default random generator, the environment and signals are shared by all ranks.

    Example:
        >>> run_ranks(lambda comm: comm.allreduce_obj(comm.rank), 3)
        [3, 3, 3]
    """
    store = HashStore()

    def rank_main(rank: int) -> Result:
        transport = TorchDistributedTransport(
            store, rank, world_size, timeout_s=timeout_s, is_trusted=is_trusted
        )
        comm = create_communicator(
            name,
            transport=transport,
            topology=topology or Topology(("localhost",) * world_size),
            timeout_s=Timeout(timeout_s, timeout_s, timeout_s),
            allreduce_grad_dtype=allreduce_grad_dtype,
        )
        try:
            return function(comm)
        finally:
            comm.finalize()

    return run_threads(rank_main, world_size)


def run_threads(function: Callable[[int], Result], world_size: int) -> list[Result]:
    """Call ``function(rank)`` for every rank, one thread each, as `run_ranks` does."""
    results: list[Result | None] = [None] * world_size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        torch.get_num_threads()  # or the thread's first matrix product would use all cores
        try:
            results[rank] = function(rank)
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not is_consequence(error)), errors[0])
    return results  # type: ignore[return-value]
