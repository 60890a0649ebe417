"""Start the agents ourselves, with the variables that torchrun would set."""

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
    """One agent per rank. ``env`` holds MASTER_ADDR and MASTER_PORT already."""
    size = str(job.num_ranks)
    return [
        Command(
            worker_command(),
            {
                **env,
                "RANK": str(rank),
                "WORLD_SIZE": size,
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
            },
            name=f"the agent of rank {rank}",
            rank=rank,
        )
        for rank in range(job.num_ranks)
    ]
