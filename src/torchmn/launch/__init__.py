"""How processes start: one file per way, one supervisor for all. Starts without torch."""

from torchmn.launch.detect import BACKENDS, Machine, choose_backend, this_machine
from torchmn.launch.job import Job, python_command
from torchmn.launch.start import run_job

__all__ = [
    "BACKENDS",
    "Job",
    "Machine",
    "choose_backend",
    "python_command",
    "run_job",
    "this_machine",
]
