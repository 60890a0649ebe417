"""Run commands on other hosts, through ssh or another remote shell.

Environment and secret are sent on the standard input of a command, not on its command line, which
other users of the host could read.
"""

import shlex
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from torchmn.base.errors import LaunchError
from torchmn.cluster.commands import ask
from torchmn.cluster.environment_variables import RSH_VARIABLE, split_words
from torchmn.cluster.network import is_this_host
from torchmn.cluster.units import counted
from torchmn.control.codec import decode, encode
from torchmn.control.processes import python_module
from torchmn.run.host_checks import HostFacts, ProbeHost, differences
from torchmn.run.job import Command, Job
from torchmn.run.rank_environment import deciding_hosts
from torchmn.run.starters import local
from torchmn.run.starters.node_main import ProcessOrder, StartProcesses

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
PBS_COMMAND, PBS_SHELL = "pbs_tmrsh", "torchmn.run.starters.pbs_shell"
QRSH_COMMAND, QRSH_SHELL = ("qrsh", "-inherit"), "torchmn.run.starters.qrsh_shell"
# Modules of ours that make a remote shell of these commands.
_WRAPPERS = {(PBS_COMMAND,): PBS_SHELL, QRSH_COMMAND: QRSH_SHELL}
_OF_SCHEDULERS = (
    (("PBS_JOBID", "PBS_NODEFILE"), (PBS_COMMAND,)),
    (("JOB_ID", "PE_HOSTFILE"), QRSH_COMMAND),
    (("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), ("srun", "--overlap", "-Q", "-N1", "-n1", "-w")),
)
NO_SHELL = ("srun",)  # remote shells that run a command, not a line for a shell
# How long a host may take to answer; a scheduler starts a task there first.
_ANSWER_S, _SCHEDULER_ANSWER_S = 10.0, 30.0
_CARRIED = (
    *("TORCHMN_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_", "TORCH_", "PYTORCH_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "UCX_", "FI_", "HF_", "CONDA_"),
    "PYTHONHASHSEED",
)
_CARRIED_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")


def remote_shell(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that runs another command on a host of this job.

    This is ``TORCHMN_RSH`` if set; inside a job of PBS, Slurm or Grid Engine the scheduler's own
    command, which accounts for and ends what it starts, and which many sites require; else ssh in
    batch mode. `pbs_tmrsh` is not a shell, and processes below `qrsh` get signals that would end
    them: modules of torchmn wrap both. Raises UsageError: ``TORCHMN_RSH`` has unbalanced quotes.
    """
    shell = _chosen_shell(env)
    return python_module(_WRAPPERS[shell]) if shell in _WRAPPERS else shell


def remote_shell_name(env: Mapping[str, str]) -> str:
    """Return the name of the program that `remote_shell` uses, for messages."""
    return _chosen_shell(env)[0]


def _chosen_shell(env: Mapping[str, str]) -> tuple[str, ...]:
    chosen = split_words(env.get(RSH_VARIABLE, ""), source=RSH_VARIABLE)
    if chosen:
        return chosen
    for variables, command in _OF_SCHEDULERS:
        is_inside = all(env.get(name) for name in variables)
        if is_inside and shutil.which(command[0], path=env.get("PATH")):
            return command
    return SSH


def to_host(env: Mapping[str, str], host: str, module: str) -> tuple[str, ...]:
    """Return the command that runs a module of torchmn on a host, here without remote shell."""
    if is_this_host(host):
        return python_module(module)
    path = env.get("PYTHONPATH")  # where torchmn may be found here
    prefix = ("env", f"PYTHONPATH={path}") if path else ()
    command = (*prefix, *python_module(module))
    shell = remote_shell(env)
    return (*shell, host, *(command if shell[0] in NO_SHELL else (shlex.join(command),)))


def is_carried(job: Job, name: str) -> bool:
    """Whether a variable is copied to other hosts: those of ``-x`` and well-known ones."""
    return name in job.exported or name in _CARRIED_NAMES or name.startswith(_CARRIED)


def commands(job: Job, env: Mapping[str, str], *, input_path: str = "") -> list[Command]:
    """Return a remote shell's command for each host, which starts the agents of its ranks.

    Their environment there gets the variables that are carried (`is_carried`) or differ from
    ``env``. ``input_path`` is that of a rank on this host.
    """
    return [_command(job, inter_rank, env, input_path) for inter_rank in range(len(job.hosts))]


def _command(job: Job, inter_rank: int, env: Mapping[str, str], input_path: str) -> Command:
    host = job.hosts[inter_rank]
    path = input_path if is_this_host(host.name) else ""
    order = StartProcesses(
        commands=[
            ProcessOrder(
                argv=list(agent.argv),
                env={
                    name: text
                    for name, text in agent.env.items()
                    if is_carried(job, name) or env.get(name) != text
                },
            )
            for agent in local.commands(job, env, inter_rank, input_path=path)
        ]
    )
    return Command(
        to_host(env, host.name, "torchmn.run.starters.node_main"),
        env,
        name=f"{remote_shell_name(env)} to {host.name}",
        ranks=job.ranks_on(inter_rank),
        stdin=encode(order),
    )


def check_hosts(job: Job, env: Mapping[str, str]) -> tuple[str, ...]:
    """Check all hosts of the job in parallel; return the networks that connect them, if known.

    Raises LaunchError with the name of every host that does not answer within seconds, that does
    not have the script, or whose versions differ.
    """
    names = [host.name for host in job.hosts]
    # Threads that wait for ssh: one host after another would take the limit for each silent one.
    with ThreadPoolExecutor(max_workers=min(64, len(names))) as pool:
        answers = dict(
            zip(names, pool.map(lambda name: _check_host(job, name, env), names), strict=True)
        )
    silent = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    if silent:
        reasons = "; ".join(f"{name}: {why.rstrip('.')}" for name, why in silent.items())
        raise LaunchError(
            f"{len(silent)} of {counted(len(names), 'host')} did not answer: {reasons}. Check "
            f"whether `{shlex.join((*remote_shell(env), next(iter(silent)), 'true'))}` works from "
            "here."
        )
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, HostFacts)}
    problems = [f"on {name} {found.problem}" for name, found in facts.items() if found.problem]
    if problems:
        raise LaunchError("; ".join(problems) + ".")
    differing = differences({name: found.versions for name, found in facts.items()})
    if differing:
        raise LaunchError(f"Hosts differ: {differing}. Install the same on all of them.")
    return tuple(dict.fromkeys(each.network for each in facts.values() if each.network))


def _check_host(job: Job, host: str, env: Mapping[str, str]) -> HostFacts | str:
    """Return the facts of one host, or as text the reason why it did not answer."""
    is_task = _chosen_shell(env) in [command for _, command in _OF_SCHEDULERS]
    limit_s = _SCHEDULER_ANSWER_S if is_task else _ANSWER_S
    order = ProbeHost(cwd=str(job.cwd), script=job.script, hosts=deciding_hosts(job))
    command = to_host(env, host, "torchmn.run.host_checks")
    answer = ask(command, limit_s=limit_s, env=env, order=encode(order).decode())
    if answer.returncode == 124:
        return f"no response within {limit_s:g} s"
    if answer.returncode == 0:
        try:
            # The last line: what the shell's start-up files print comes before it.
            return decode(answer.out.splitlines()[-1], HostFacts)
        except (ValueError, IndexError):
            return f"it answered {answer.out[-80:]!r}"
    return (answer.err.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
