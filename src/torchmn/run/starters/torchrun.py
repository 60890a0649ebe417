"""Start the agents through torchrun, one instance of it on each host."""

import sys
from collections.abc import Mapping

from torchmn.run.job import WORKER_MODULE, Command, Job
from torchmn.run.starters.remote import node_command


def commands(
    job: Job, env: Mapping[str, str], *, master_addr: str, master_port: int
) -> list[Command]:
    """Return the command of one torchrun per host, with a rendezvous on the first host."""
    return [
        _on_host(job, env, inter_rank, master_addr, master_port)
        for inter_rank in range(len(job.hosts))
    ]


def _on_host(
    job: Job, env: Mapping[str, str], inter_rank: int, master_addr: str, master_port: int
) -> Command:
    ranks = job.ranks_on(inter_rank)
    options = ["--nnodes", str(len(job.hosts)), "--node-rank", str(inter_rank)]
    options += ["--nproc-per-node", str(len(ranks))]
    options += ["--master-addr", master_addr, "--master-port", str(master_port)]
    command = Command(
        (
            *(sys.executable, "-m", "torch.distributed.run", *options, *job.launcher_args),
            *("-m", WORKER_MODULE),
        ),
        env,
        name=f"torchrun on {job.hosts[inter_rank].name}",
        ranks=ranks,
    )
    return node_command(job, inter_rank, env, [command]) if job.has_other_hosts else command
