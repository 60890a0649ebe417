"""The agent of one rank: ``python -m torchmn.launch.worker``, the parent of the user's script.

It finds its rank from whoever started it, takes its orders from the supervisor, binds the rank to
its share of the cores and runs the script. It never imports torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torchmn.errors import LaunchError, TorchmnError
from torchmn.launch import channel as channels
from torchmn.launch.agent import Agent
from torchmn.launch.channel import Channel
from torchmn.launch.host_facts import versions, why_not_here
from torchmn.launch.local import reserve_port
from torchmn.launch.messages import Challenge, Hello, Refused, Run
from torchmn.launch.processes import adopt_orphans, watch_signals
from torchmn.topology import (
    LaunchedPlace,
    Processors,
    Route,
    Share,
    available_processors,
    gpu_neighbourhoods,
    launched_place,
    memory_nodes,
    route_of,
    share_beside,
    share_of,
)

_OTHERS_S = 600.0
"""The supervisor hangs up much earlier if the other ranks do not come."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def main() -> int:
    """Run one rank and return its exit code as a shell would report it."""
    adopt_orphans()
    wakeup = watch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    try:
        place = launched_place(os.environ)
        if place is None:
            raise LaunchError("No launcher started this agent: run `torchmn run` instead.")
        channel, order, route, keeper = report_for_work(place.rank, os.environ)
        problem = why_not_here(order.cwd, order.script)
        if problem:
            channel.post(Refused(text=problem))
            channel.close()
            return 1
        share, beside = take_share(place, os.environ, available_processors())
        env = script_environment(os.environ, share, order.env, route)
        with keeper:
            return Agent(place.rank, order, channel, wakeup, share, beside).run(env)
    except TorchmnError as error:
        print(f"torchmn: {error}", file=sys.stderr, flush=True)
        return 1


def report_for_work(
    rank: int, env: Mapping[str, str]
) -> tuple[Channel, Run, Route | None, socket.socket]:
    """Prove to the supervisor who we are and receive the command, from it and nobody else.

    Also returns the way to it, and the socket that keeps the port on which rank 0 may meet all.

    Raises LaunchError: there is no supervisor, or it does not know the secret of the job.
    """
    address, secret = env.get(channels.ADDRESS_VARIABLE), env.get("TORCHMN_SECRET")
    if not address or not secret:
        raise LaunchError(
            f"{channels.ADDRESS_VARIABLE} or TORCHMN_SECRET is not set: run `torchmn run` instead."
        )
    channel = channels.connect(address)
    challenge = channel.wait_for(Challenge, limit_s=30.0)
    number = channels.new_number()
    own_address = channel.own_address
    keeper, port = reserve_port(own_address)
    channel.post(
        Hello(
            signature=channels.signature(secret, "agent", challenge.number),
            number=number,
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=own_address,
            port=port,
            versions=versions(),
        )
    )
    order = channel.wait_for(Run, limit_s=_OTHERS_S)
    if not channels.is_signature(order.signature, secret, "supervisor", number):
        raise LaunchError(f"Who answers at {address} does not know the secret of this job.")
    return channel, order, route_of(own_address), keeper


def run_as_rank(argv: Sequence[str], env: Mapping[str, str], place: LaunchedPlace) -> NoReturn:
    """Become the script of a rank that another launcher has started, bound to its cores.

    A launcher may have bound it already, by a rule of its own. What MPI launchers and torchrun have
    themselves is divided anew, so that the binding is the same under all of them; Slurm's stays,
    since only Slurm knows which cores of the node are the job's.
    """
    own, around = available_processors(), available_processors(pid=os.getppid())
    is_bound = set(own.logical) < set(around.logical)
    if not (is_bound and place.kind == "scheduler"):
        take_share(place, env, around if is_bound else own)
    share = share_of(available_processors(), intra_rank=0, intra_size=1)
    os.execvpe(argv[0], list(argv), script_environment(env, share, {}, None))


def take_share(
    place: LaunchedPlace, env: Mapping[str, str], processors: Processors
) -> tuple[Share, str]:
    """Bind this process, and so its children, to the rank's share of the node's processors.

    Also says in words what the share lies beside. Memory then comes from the node of these cores:
    that is the system's rule where nobody has set another.
    """
    share, beside = share_beside(
        processors,
        gpu_neighbourhoods(env),
        intra_rank=0 if place.intra_rank is None else place.intra_rank,
        intra_size=1 if place.intra_size is None else place.intra_size,
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)
    nodes = memory_nodes(share.cores)
    words = [f"beside GPU {place.intra_rank} ({beside.bus})"] if beside else []
    words += [f"memory node {', '.join(map(str, nodes))}"] if nodes else []
    return share, ", ".join(words)


def script_environment(
    env: Mapping[str, str], share: Share, ordered: Mapping[str, str], route: Route | None
) -> dict[str, str]:
    """What the script sees: as many threads as it has cores unless the user chose a number.

    ``ordered`` is the supervisor's, which counts where the launcher has set nothing. gloo and NCCL
    use the interface of ``route``: it is known to connect us with the others.
    """
    threads = env.get("OMP_NUM_THREADS") or str(share.num_threads)
    interfaces = {} if route is None else dict.fromkeys(_INTERFACES, route.interface)
    chosen = {
        **ordered,
        **interfaces,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",  # its output is a pipe: lines should arrive when they are written
    }
    has_meeting_point = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    left = {channels.ADDRESS_VARIABLE, *(() if has_meeting_point else ordered)}
    given = {name: text for name, text in env.items() if name not in left}
    return {**chosen, **given, "OMP_NUM_THREADS": threads}


if __name__ == "__main__":
    sys.exit(main())
