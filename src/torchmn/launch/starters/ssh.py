"""Start the agents ourselves on several hosts, with one ssh for each host."""

from __future__ import annotations

from collections.abc import Mapping

from torchmn.launch.job import Command, Job
from torchmn.launch.starters.local import host_commands
from torchmn.launch.starters.remote import node_command


def commands(job: Job, env: Mapping[str, str]) -> list[Command]:
    """One command per host, which starts the agents of its ranks."""
    return [
        node_command(job, inter_rank, env, host_commands(job, env, inter_rank))
        for inter_rank in range(len(job.hosts))
    ]
