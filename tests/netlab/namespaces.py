"""Linux namespaces, by the tools of iproute2 and util-linux.

The namespaces have no names. They exist as long as a process holds descriptors of them or runs in
them; then the kernel removes them with all their devices. So no explicit removal is needed, and
nothing can be left in ``/run/netns``.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from torchmn.errors import LaunchError

_LINKS = {"net": "net", "uts": "uts", "mount": "mnt"}
"""Kinds of namespaces, as the tools name them, and their links in ``/proc/PID/ns``."""
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "umount", "taskset")
_PROBE = """
ip link add name probe0 type veth peer name probe1
tc qdisc add dev probe0 root tbf rate 1gbit burst 128kb latency 20ms
ip link add name probe2 type bridge
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
"""


@cache
def missing_requirement() -> str | None:
    """Why no lab can be created here, or None. It is tried in temporary namespaces."""
    if sys.platform != "linux":
        return f"test hosts need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "test hosts need root, to create network namespaces"
    missing = [name for name in _TOOLS if shutil.which(name, path=_environment()["PATH"]) is None]
    if missing:
        return f"test hosts need {', '.join(missing)}: install iproute2 and util-linux"
    try:
        os.close(os.pidfd_open(os.getpid()))
        call([tool("unshare"), "--net", "--uts", "--mount", "/bin/sh", "-ec", _PROBE])
    except (OSError, LaunchError) as error:
        return f"test hosts cannot be created: {error}"
    return None


def tool(name: str) -> str:
    """The path of a system tool; those of root may be outside of a user's PATH.

    Raises LaunchError: it is not installed.
    """
    path = shutil.which(name, path=_environment()["PATH"])
    if path is None:
        raise LaunchError(f"{name} is not installed. Install iproute2 and util-linux.")
    return path


def _environment() -> dict[str, str]:
    path = os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": f"{path}:/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"}


def call(command: Sequence[str], *, text: str = "") -> str:
    """Run a system tool with ``text`` as its input and return its output.

    Raises LaunchError: it failed; with its error output.
    """
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env=_environment(), check=False
    )
    if done.returncode:
        raise _failure(command, done.stderr)
    return done.stdout


def _failure(command: Sequence[str], errors: str) -> LaunchError:
    what = os.path.basename(command[0])
    return LaunchError(f"{what} failed: {' '.join(errors.split()) or 'without a message'}")


def make_namespaces(kinds: Collection[str], script: str, *args: str) -> dict[str, str]:
    """Create namespaces and run ``script`` in them; return the path of each kind.

    This process holds them until it ends.

    Raises LaunchError: the system or a command of the script failed.
    """
    options = [f"--{kind}" for kind in kinds]
    if "mount" in kinds:
        options.append("--propagation=slave")  # so that the machine can unmount its own
    lines = f"{script}\necho made; read -r _ || :"
    command = [tool("unshare"), *options, "/bin/sh", "-ec", lines, "sh", *args]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    ) as maker:
        if maker.stdout is None or maker.stdout.readline() != "made\n":
            raise _failure(command, maker.stderr.read() if maker.stderr else "")
        return {kind: _keep(f"/proc/{maker.pid}/ns/{_LINKS[kind]}") for kind in kinds}


def _keep(namespace: str) -> str:
    return f"/proc/{os.getpid()}/fd/{os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)}"


def entering(namespaces: Mapping[str, str]) -> list[str]:
    """The prefix of a command that runs inside, as the same process."""
    return [tool("nsenter"), *(f"--{kind}={path}" for kind, path in namespaces.items()), "--"]


def pinned(cores: Collection[int]) -> list[str]:
    """The prefix of a command that runs on these cores only."""
    return [tool("taskset"), "-c", ",".join(map(str, sorted(cores)))]
