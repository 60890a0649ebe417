"""Start the agents ourselves, with the variables that torchrun would set, here or through ssh."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from torchmn.launch.job import Command, Job, worker_command


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """A free port, and the socket that keeps it free until rank 0 listens there.

    The socket is bound and does not listen: on Linux a second socket may then bind the same port
    if both set SO_REUSEADDR, as torch's store does, while nobody else is given the port. So it
    can stay open for the life of the job and no other process can take the port in between.
    """
    keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((host, 0))
    port: int = keeper.getsockname()[1]
    return keeper, port


def commands(job: Job, env: Mapping[str, str]) -> list[Command]:
    """One agent per rank on this machine."""
    return host_commands(job, env, 0)


def host_commands(job: Job, env: Mapping[str, str], inter_rank: int) -> list[Command]:
    """One agent for each rank of one of the job's hosts. Where they meet, their orders say."""
    ranks = job.ranks_on(inter_rank)
    return [
        Command(
            worker_command(),
            {
                **env,
                "RANK": str(rank),
                "WORLD_SIZE": str(job.num_ranks),
                "LOCAL_RANK": str(intra_rank),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "GROUP_RANK": str(inter_rank),
                "GROUP_WORLD_SIZE": str(len(job.hosts)),
            },
            name=f"the agent of rank {rank}",
            ranks=range(rank, rank + 1),
        )
        for intra_rank, rank in enumerate(ranks)
    ]
