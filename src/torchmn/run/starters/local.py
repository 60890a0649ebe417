"""Start the agents as child processes, with the variables that torchrun would set."""

from collections.abc import Mapping

from torchmn.run.job import Command, Job, worker_command
from torchmn.run.rank_environment import rank_variables


def commands(
    job: Job, env: Mapping[str, str], inter_rank: int = 0, *, input_path: str = ""
) -> list[Command]:
    """Return one agent's command per rank of a host, by default the first host.

    The variables lack the address of rank 0: the supervisor sends it with the script's command.
    """
    slots = [host.slots for host in job.hosts]
    return [
        Command(
            worker_command(input_path),
            {**env, **rank_variables(slots, inter_rank, intra_rank)},
            name=f"the agent of rank {rank}",
            ranks=range(rank, rank + 1),
        )
        for intra_rank, rank in enumerate(job.ranks_on(inter_rank))
    ]
