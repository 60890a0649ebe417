"""Test hosts on which a fault can be planted, and the doctor's run on them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.netlab import Host, Lab, netlab

import torchmn

SOURCES = str(Path(torchmn.__file__).parents[1])
LIMIT_S = 180.0
_SHELL = """#!/bin/sh
# The remote shell of the test hosts, with what was planted on one of them.
case $1 in
{cases}
esac
exec {enter} "$@"
"""


class Testbed:
    """One lab, for one run. What was planted is removed when ``stack`` is left.

    ``has_own_cores``: each host has one core, else all share all. Two virtual cores are often one
    physical core, of which each is slower while other programs use its sibling.
    """

    def __init__(
        self, stack: ExitStack, num_hosts: int, rate: str | None, *, has_own_cores: bool = False
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        own = [{core} for core in cores[:num_hosts]] if has_own_cores else None
        self.stack = stack
        self.lab: Lab = stack.enter_context(netlab(num_hosts, rate, cores=own))
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-")))
        self.options: list[str] = []
        self.slots = 1
        self.data = self.folder / "data"
        self.data.mkdir()
        self._shell: dict[str, list[str]] = {}
        self._shim: dict[str, Path] = {}

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.lab.hosts

    def in_shell(self, host: Host, line: str) -> None:
        """A line of the shell that starts the doctor's program on a host, before it starts."""
        self._shell.setdefault(host.name, []).append(line)

    def shim(self, host: Host) -> Path:
        """A folder that comes first in this host's PYTHONPATH, and its bin first in PATH."""
        if host.name not in self._shim:
            folder = self._shim[host.name] = self.folder / f"shim-{host.name}"
            (folder / "bin").mkdir(parents=True)
            self.in_shell(host, f'export PATH={folder}/bin:"$PATH"')
            self.in_shell(
                host,
                f'h=$1; shift; set -- "$h" "$(echo "$*" | sed "s#PYTHONPATH=#&{folder}:#")"',
            )
        return self._shim[host.name]

    def control_group(self, host: Host, controller: str, **settings: str) -> None:
        """Put the doctor's program on a host into a control group (version 1) with settings."""
        mount = Path("/sys/fs/cgroup") / controller
        group = mount / f"doctor-{os.getpid()}-{host.name}"
        group.mkdir()
        self.stack.callback(_remove_group, group)
        for name, text in settings.items():
            (group / name.replace("__", ".")).write_text(text)
        self.in_shell(host, f"echo $$ > {group}/cgroup.procs")

    def examine(self) -> dict[str, Any]:
        """Run the doctor on the first host, for all of them; what it prints as JSON."""
        script = self.folder / "shell"
        cases = [
            "\n".join([f"{name})", *(f"  {line}" for line in lines), "  ;;"])
            for name, lines in self._shell.items()
        ]
        enter = shlex.quote(str(self.lab.rsh_agent))
        script.write_text(_SHELL.format(cases="\n".join(cases), enter=enter))
        script.chmod(0o755)
        # the program on the first host is started without the remote shell
        own = self._shim.get(self.hosts[0].name)
        path = f"{own}/bin:{os.environ['PATH']}" if own else os.environ["PATH"]
        names = ",".join(f"{host.name}:{self.slots}" for host in self.hosts)
        words = ["doctor", "--hosts", names, "--json", "--path", self.data, *self.options]
        done = self.hosts[0].run(
            [sys.executable, "-m", "torchmn", *words],
            env={**os.environ, "PATH": path, "PYTHONPATH": SOURCES, "TORCHMN_RSH": str(script)},
            cwd=self.folder,
            check=False,
            timeout_s=LIMIT_S,
        )
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"the doctor failed: {done.stderr[-2000:]}") from None
        return found


def _remove_group(group: Path) -> None:
    for line in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(line)
    group.rmdir()
