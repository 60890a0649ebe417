"""Starting and supervising the ranks of a job; preemption; crashes. Starts without torch.

The names load on first use: an agent, which runs once per rank, needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torchmn.cluster.environment_variables import split_words

if TYPE_CHECKING:
    from torchmn.run.backend import BACKENDS, Machine, choose_backend, this_machine
    from torchmn.run.crash import install_crash_handler
    from torchmn.run.job import Job, python_command
    from torchmn.run.plan import LAUNCHERS, RunOptions, detect_existing_rank, plan_elastic, plan_job
    from torchmn.run.preemption import SAVED_STATUS, Preemption
    from torchmn.run.rank_environment import run_as_rank
    from torchmn.run.start import dry_run, dry_run_elastic, run_elastic_job, run_job

__all__ = [
    "BACKENDS",
    "LAUNCHERS",
    "SAVED_STATUS",
    "Job",
    "Machine",
    "Preemption",
    "RunOptions",
    "choose_backend",
    "detect_existing_rank",
    "dry_run",
    "dry_run_elastic",
    "install_crash_handler",
    "plan_elastic",
    "plan_job",
    "python_command",
    "run_as_rank",
    "run_elastic_job",
    "run_job",
    "split_words",
    "this_machine",
]
_NAMES = {
    "backend": ("BACKENDS", "Machine", "choose_backend", "this_machine"),
    "crash": ("install_crash_handler",),
    "job": ("Job", "python_command"),
    "plan": ("LAUNCHERS", "RunOptions", "detect_existing_rank", "plan_elastic", "plan_job"),
    "preemption": ("SAVED_STATUS", "Preemption"),
    "rank_environment": ("run_as_rank",),
    "start": ("dry_run", "dry_run_elastic", "run_elastic_job", "run_job"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"torchmn.run.{module}"), name)
    raise AttributeError(f"module 'torchmn.run' has no attribute {name!r}")
