"""``python -m torchmn.run.agent_main``: the agent of one rank, the parent of the user's script.

It reads its rank from the variables of the launcher that started it, gets the command from the
supervisor, binds itself to the rank's share of the cores and runs the script. Its argument, if
there is one, is the path of the input for the rank that reads it. It does not import torch.
"""

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial

from torchmn.base.errors import LaunchError, TorchmnError
from torchmn.base.terminal import say
from torchmn.cluster.cpus import available_processors
from torchmn.cluster.environment_variables import (
    HOSTS_VARIABLE,
    SECRET_VARIABLE,
    SUPERVISOR_VARIABLE,
)
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.cluster.network import Route, local_address_among, local_address_for, route_of
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.connection import Channel, reserve_port
from torchmn.control.messages import AgentHello, ScriptStarted, StartRefused, StartScript
from torchmn.control.processes import adopt_orphans, signal_socket
from torchmn.run.agent import HANDLED_SIGNALS, Agent
from torchmn.run.backend import open_mpi_memory
from torchmn.run.host_checks import find_problem, versions
from torchmn.run.rank_environment import bind_cores, script_environment
from torchmn.run.script_input import input_rank

_ALL_RANKS_S = 3600.0  # the supervisor disconnects much earlier if the other ranks do not start


def main() -> int:
    """Run one rank and return its exit code as a shell would report it."""
    # Before anything is started: orphans become children of this process, and signals wait in the
    # socket until the agent reads them, instead of ending this process.
    adopt_orphans()
    wakeup = signal_socket(*HANDLED_SIGNALS)
    try:
        place = read_launcher_env(os.environ)
        if place is None:
            raise LaunchError("No launcher started this agent: run `torchmn run` instead.")
        channel, order, route, keeper = connect_to_supervisor(place.rank, os.environ)
        problem = find_problem(order.cwd, order.script)
        if problem:
            channel.post(StartRefused(text=problem))
            channel.close()
            return 1
        share, beside = bind_cores(place, os.environ, available_processors())
        env = script_environment(os.environ, share, order.env, route)
        threads, cores = env["OMP_NUM_THREADS"], sorted(share.cores)
        num_threads = int(threads) if threads.isdigit() else share.num_threads
        started = partial(ScriptStarted, cores=cores, num_threads=num_threads, beside=beside)
        # Until the script has ended: its own store binds the reserved port of rank 0 as well.
        with keeper, open_mpi_memory(env) as variables:
            on_host = (place.intra_rank or 0, place.intra_size or 1)
            agent = Agent(
                place.rank,
                order,
                channel,
                wakeup,
                started,
                on_host,
                input_path="".join(sys.argv[1:]) if place.rank == input_rank(os.environ) else "",
            )
            return agent.run({**env, **variables})
    except TorchmnError as error:
        say(str(error))
        return 1


def connect_to_supervisor(
    rank: int, env: Mapping[str, str]
) -> tuple[Channel, StartScript, Route | None, socket.socket]:
    """Authenticate to the supervisor and receive the command.

    Also returns the route to the other hosts, and the socket that reserves the port on which rank 0
    may serve the rendezvous of all ranks.

    Raises LaunchError: there is no supervisor, or it does not know the secret of the job, or it
    does not expect this rank.
    """
    address, secret = env.get(SUPERVISOR_VARIABLE), env.get(SECRET_VARIABLE)
    if not address or not secret:
        raise LaunchError(
            f"{SUPERVISOR_VARIABLE} or {SECRET_VARIABLE} is not set: use `torchmn run`."
        )
    hosts = filter(None, env.get(HOSTS_VARIABLE, "").split(","))
    own_address = local_address_among(hosts) or local_address_for(address.rpartition(":")[0])
    if own_address is None:
        raise LaunchError(f"No route from {socket.gethostname()} to the supervisor, {address}.")
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
    return (
        channel,
        channel.wait_for(StartScript, limit_s=_ALL_RANKS_S),
        route_of(own_address),
        keeper,
    )


if __name__ == "__main__":
    sys.exit(main())
