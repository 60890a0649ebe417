"""Jobs of schedulers: write, submit and follow them. Without torch.

Job scripts for PBS, Slurm and Grid Engine, manifests for Kubernetes.
"""

from torchmn.launch.exported_variables import parse_variable
from torchmn.launch.submit.choose import (
    KUBERNETES,
    NAMES,
    SCHEDULERS,
    choose_scheduler,
    installed_schedulers,
    raise_if_no_command,
)
from torchmn.launch.submit.following import Follower
from torchmn.launch.submit.kubernetes import create, logs_command, manifest, pod_name
from torchmn.launch.submit.request import JobRequest, default_name, find_environment
from torchmn.launch.submit.script import job_script
from torchmn.launch.submit.settings import Settings, settings_from_options
from torchmn.launch.submit.site import Site, find_site, read_site
from torchmn.launch.submit.submission import (
    make_log_dir,
    raise_if_folder,
    submit,
    write_script,
)

__all__ = [
    "KUBERNETES",
    "NAMES",
    "SCHEDULERS",
    "Follower",
    "JobRequest",
    "Settings",
    "Site",
    "choose_scheduler",
    "create",
    "default_name",
    "find_environment",
    "find_site",
    "installed_schedulers",
    "job_script",
    "logs_command",
    "make_log_dir",
    "manifest",
    "parse_variable",
    "pod_name",
    "raise_if_folder",
    "raise_if_no_command",
    "read_site",
    "settings_from_options",
    "submit",
    "write_script",
]
