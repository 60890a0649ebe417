"""The agent of one rank: ``python -m torchmn.launch.agent_main``, the parent of the user's script.

It finds its rank from whoever started it, takes its orders from the supervisor, binds the rank to
its share of the cores and runs the script. It never imports torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping

from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.messages import AgentHello, StartRefused, StartScript
from torchmn.control.processes import adopt_orphans, signal_socket
from torchmn.errors import LaunchError, TorchmnError
from torchmn.launch.agent import Agent
from torchmn.launch.host_checks import find_problem, versions
from torchmn.launch.rank_environment import script_environment, take_share
from torchmn.launch.starters.local import reserve_port
from torchmn.topology import (
    Route,
    available_processors,
    local_address_for,
    read_launcher_env,
    route_of,
)

_OTHERS_S = 600.0
"""The supervisor hangs up much earlier if the other ranks do not come."""


def main() -> int:
    """Run one rank and return its exit code as a shell would report it."""
    adopt_orphans()
    wakeup = signal_socket(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    try:
        place = read_launcher_env(os.environ)
        if place is None:
            raise LaunchError("No launcher started this agent: run `torchmn run` instead.")
        channel, order, route, keeper = report_for_work(place.rank, os.environ)
        problem = find_problem(order.cwd, order.script)
        if problem:
            channel.post(StartRefused(text=problem))
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
) -> tuple[Channel, StartScript, Route | None, socket.socket]:
    """Prove to the supervisor who we are and receive the command, from it and nobody else.

    Also returns the way to it, and the socket that keeps the port on which rank 0 may meet all.

    Raises LaunchError: there is no supervisor, or it does not know the secret of the job, or it
    does not want us.
    """
    address, secret = env.get(channels.ADDRESS_VARIABLE), env.get("TORCHMN_SECRET")
    if not address or not secret:
        raise LaunchError(
            f"{channels.ADDRESS_VARIABLE} or TORCHMN_SECRET is not set: run `torchmn run` instead."
        )
    own_address = local_address_for(address.rpartition(":")[0])
    if own_address is None:
        raise LaunchError(f"No way leads from {socket.gethostname()} to the supervisor, {address}.")
    keeper, port = reserve_port(own_address)
    identity = AgentHello(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        address=own_address,
        port=port,
        versions=versions(),
    )
    channel = connect_authenticated(
        address, secret=secret, role=channels.SUPERVISOR, identity=identity
    )
    return channel, channel.wait_for(StartScript, limit_s=_OTHERS_S), route_of(own_address), keeper


if __name__ == "__main__":
    sys.exit(main())
