"""Start the ranks of a job and supervise them. Starts without torch."""

from torchmn.launch.backend import BACKENDS, Machine, choose_backend, this_machine
from torchmn.launch.exported_variables import split_words
from torchmn.launch.job import Job, python_command
from torchmn.launch.plan import LAUNCHERS, RunOptions, detect_existing_rank, plan_elastic, plan_job
from torchmn.launch.rank_environment import run_as_rank
from torchmn.launch.start import dry_run, dry_run_elastic, run_elastic_job, run_job

__all__ = [
    "BACKENDS",
    "LAUNCHERS",
    "Job",
    "Machine",
    "RunOptions",
    "choose_backend",
    "detect_existing_rank",
    "dry_run",
    "dry_run_elastic",
    "plan_elastic",
    "plan_job",
    "python_command",
    "run_as_rank",
    "run_elastic_job",
    "run_job",
    "split_words",
    "this_machine",
]
