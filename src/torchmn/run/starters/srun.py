"""Start the agents as a job step of Slurm, inside an allocation or with one made for it."""

import shutil
from collections.abc import Mapping

from torchmn.base.errors import LaunchError
from torchmn.run.job import THIS_HOST, Command, Job, worker_command

# The PMI by which an MPI program finds its rank; `srun --mpi=list` shows those of a Slurm.
PMIX = "pmix"


def command(job: Job, env: Mapping[str, str]) -> Command:
    """Return the command of one srun for all ranks. The agents bind themselves to cores.

    Hosts with unequal numbers of ranks are named one by one (``--distribution=arbitrary``).
    Raises LaunchError: there is no srun.
    """
    path = shutil.which("srun", path=env.get("PATH"))
    if path is None:
        raise LaunchError(
            "--launcher srun, but there is no srun on the PATH: load Slurm's commands, or use "
            "--launcher ssh or mpirun."
        )
    options = ["--ntasks", str(job.num_ranks), "--cpu-bind=none", "--kill-on-bad-exit=1"]
    options += ["--export=ALL", "--unbuffered"]
    if env.get("SLURM_CPUS_PER_TASK"):  # which srun does not take over from sbatch since 22.05
        options += ["--cpus-per-task", env["SLURM_CPUS_PER_TASK"]]
    if job.backend == "mpi" and not any(word.startswith("--mpi") for word in job.launcher_args):
        options.append(f"--mpi={PMIX}")
    names = [host.name for host in job.hosts]
    if names != [THIS_HOST]:
        options += ["--nodes", str(len(names))]
        if len({host.slots for host in job.hosts}) == 1:
            options += ["--ntasks-per-node", str(job.hosts[0].slots)]
            options += ["--nodelist", ",".join(names)]
        else:
            options += ["--distribution=arbitrary", "--nodelist"]
            options.append(",".join(host.name for host in job.hosts for _ in range(host.slots)))
    return Command((path, *options, *job.launcher_args, *worker_command()), env, name="srun")
