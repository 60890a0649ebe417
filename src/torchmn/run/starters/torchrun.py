"""Start the agents through torchrun, one instance of it on each host."""

import sys
from collections.abc import Mapping

from torchmn.run.job import WORKER_MODULE, Command, Job
from torchmn.run.starters.remote import node_command


def commands(
    job: Job, env: Mapping[str, str], *, master_addr: str, master_port: int
) -> list[Command]:
    """Return the command of one torchrun per host, with a rendezvous on the first host."""
    found = []
    meeting = ["--nnodes", str(len(job.hosts)), "--master-addr", master_addr]
    meeting += ["--master-port", str(master_port)]
    for inter_rank, host in enumerate(job.hosts):
        ranks = job.ranks_on(inter_rank)
        place = ["--node-rank", str(inter_rank), "--nproc-per-node", str(len(ranks))]
        options = [*meeting, *place, *job.launcher_args, "-m", WORKER_MODULE]
        command = Command(
            (sys.executable, "-m", "torch.distributed.run", *options),
            env,
            name=f"torchrun on {host.name}",
            ranks=ranks,
        )
        is_elsewhere = job.has_other_hosts
        found.append(node_command(job, inter_rank, env, [command]) if is_elsewhere else command)
    return found
