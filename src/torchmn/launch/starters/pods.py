"""The pods of a Kubernetes Job: every one runs the same `torchmn run`, and no pod starts another.

Pod 0 supervises the job. It listens at ``TORCHMN_SUPERVISOR``, which the manifest sets to its name
in the job's headless Service, and starts the agents of its own ranks. The other pods wait for it
and become the process that starts theirs, as a remote shell would have started it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from torchmn.control.codec import encode
from torchmn.control.ports import listen_on
from torchmn.control.processes import python_module
from torchmn.environment_variables import PODS_VARIABLE, SECRET_VARIABLE, SUPERVISOR_VARIABLE
from torchmn.errors import LaunchError, UsageError
from torchmn.exit_status import shell_code
from torchmn.launch.job import Job
from torchmn.launch.orders import ProcessOrder, StartProcesses
from torchmn.launch.starters import local
from torchmn.launch.worker_environment import worker_environment
from torchmn.topology import Allocation, Host, pod_index

START_LIMIT_S = 1800.0
"""Nodes may be added to the cluster for a job, and images pulled, before its last pod runs."""
_PAUSE_S = 1.0
_CONNECT_S = 5.0


def raise_if_no_pods(
    given: Allocation | None, hosts: Sequence[Host], env: Mapping[str, str]
) -> None:
    """Raise UsageError: this is no pod of a job, or ranks were asked for that leave one empty."""
    if given is None or given.scheduler != "Kubernetes":
        raise UsageError(
            f"--launcher pods is for the pods of a Kubernetes Job, and {PODS_VARIABLE} is not set: "
            "`torchmn submit --scheduler kubernetes` writes the manifest that sets it."
        )
    missing = [name for name in (SUPERVISOR_VARIABLE, SECRET_VARIABLE) if not env.get(name)]
    if missing:
        raise UsageError(
            f"{PODS_VARIABLE} is set, but not {' and '.join(missing)}: take both from the manifest "
            "that `torchmn submit --scheduler kubernetes` writes."
        )
    if len(hosts) != len(given.hosts):
        raise UsageError(
            f"Every pod must have a rank, and the options leave {len(hosts)} of the "
            f"{len(given.hosts)} pods of {given.source}: leave -n and --nodes out, or write the "
            "manifest for fewer pods."
        )


def own_index(job: Job, env: Mapping[str, str]) -> int:
    """Which of the hosts of the job this pod is. Raises TopologyError."""
    return pod_index(env, len(job.hosts))


def listen(env: Mapping[str, str], limit_s: float = 60.0) -> socket.socket:
    """Pod 0's listener. Raises LaunchError: its name or port cannot be used.

    Waits for the cluster's name server to learn the name of a pod that has just started.
    """
    host, port = _supervisor(env)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            listener = listen_on(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Pod 0 ({socket.gethostname()}) cannot listen at {host}:{port} "
                    f"({error.strerror or error}). The headless Service of the job gives pods "
                    f"their names, and {SUPERVISOR_VARIABLE} must be that of pod 0."
                ) from None
            time.sleep(_PAUSE_S)
        else:
            listener.setblocking(False)
            return listener


def follow(job: Job, env: Mapping[str, str]) -> NoReturn:
    """Wait for pod 0, and become the process that starts the agents of this pod.

    Raises LaunchError: it did not listen within the job's limit.
    """
    index = own_index(job, env)
    for name in ("SIGTERM", "SIGINT"):
        # the first process of a container ignores signals without a handler
        signal.signal(signal.Signals[name], _end)
    _wait_for_supervisor(job, env)
    base = worker_environment(job, env, supervisor=env[SUPERVISOR_VARIABLE])
    commands = local.commands(job, base, index)
    order = StartProcesses(
        commands=[
            ProcessOrder(argv=list(command.argv), env=dict(command.env)) for command in commands
        ]
    )
    with tempfile.TemporaryFile() as file:  # has no name, and so no other reader
        file.write(encode(order))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    argv = python_module("torchmn.launch.starters.node_main")
    os.execve(argv[0], list(argv), dict(base))


def _wait_for_supervisor(job: Job, env: Mapping[str, str]) -> None:
    """Until its port is open. Its name is looked up again: a pod that replaces it has another
    address."""
    host, port = _supervisor(env)
    deadline = time.monotonic() + job.start_limit_s
    print(f"torchmn: waiting for pod 0 at {host}:{port}", file=sys.stderr, flush=True)
    while True:
        with suppress(OSError), socket.create_connection((host, port), timeout=_CONNECT_S):
            return
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Pod 0 did not listen at {host}:{port} within {job.start_limit_s:g} s. "
                "`kubectl describe pod` and `kubectl logs` of pod 0 say why it does not run."
            )
        time.sleep(_PAUSE_S)


def _supervisor(env: Mapping[str, str]) -> tuple[str, int]:
    host, _, port = env[SUPERVISOR_VARIABLE].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"{SUPERVISOR_VARIABLE} must look like train-0.train:29400 but is "
            f"{env[SUPERVISOR_VARIABLE]!r}. Take it from the manifest."
        )
    return host, int(port)


def _end(signum: int, _: FrameType | None) -> NoReturn:
    os._exit(shell_code(-signum))
