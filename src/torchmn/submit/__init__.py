"""Jobs of PBS, Slurm and Grid Engine: write, submit and follow them. Without torch."""

from torchmn.cluster.environment_variables import parse_variable
from torchmn.submit.choose import (
    NAMES,
    SCHEDULERS,
    choose_scheduler,
    installed_schedulers,
    raise_if_no_command,
    raise_if_unknown,
)
from torchmn.submit.following import Follower
from torchmn.submit.request import JobRequest, default_name, find_environment
from torchmn.submit.script import job_script, make_log_dir, raise_if_folder, submit, write_script
from torchmn.submit.settings import Settings, settings_from_options
from torchmn.submit.site import Site, find_site, read_site

__all__ = [
    "NAMES",
    "SCHEDULERS",
    "Follower",
    "JobRequest",
    "Settings",
    "Site",
    "choose_scheduler",
    "default_name",
    "find_environment",
    "find_site",
    "installed_schedulers",
    "job_script",
    "make_log_dir",
    "parse_variable",
    "raise_if_folder",
    "raise_if_no_command",
    "raise_if_unknown",
    "read_site",
    "settings_from_options",
    "submit",
    "write_script",
]
