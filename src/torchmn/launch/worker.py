"""The agent of one rank: ``python -m torchmn.launch.worker``, the parent of the user's script.

It finds its rank from whoever started it, takes its orders from the supervisor, binds the rank to
its share of the cores and runs the script. It never imports torch.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping

from torchmn.errors import LaunchError, TorchmnError
from torchmn.launch import channel as channels
from torchmn.launch.agent import Agent
from torchmn.launch.channel import Channel
from torchmn.launch.messages import Challenge, Hello, Run
from torchmn.launch.processes import adopt_orphans, watch_signals
from torchmn.topology import LaunchedPlace, Share, available_processors, launched_place, share_of


def main() -> int:
    """Run one rank and return its exit code as a shell would report it."""
    adopt_orphans()
    wakeup = watch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    try:
        place = launched_place(os.environ)
        if place is None:
            raise LaunchError("No launcher started this agent: run `torchmn run` instead.")
        channel, order = report_for_work(place.rank, os.environ)
        share = take_share(place)
        env = script_environment(os.environ, share)
        return Agent(place.rank, order, channel, wakeup, share).run(env)
    except TorchmnError as error:
        print(f"torchmn: {error}", file=sys.stderr, flush=True)
        return 1


def report_for_work(rank: int, env: Mapping[str, str]) -> tuple[Channel, Run]:
    """Prove to the supervisor who we are and receive the command, from it and nobody else.

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
    channel.post(
        Hello(
            signature=channels.signature(secret, "agent", challenge.number),
            number=number,
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
    )
    order = channel.wait_for(Run, limit_s=60.0)
    if not channels.is_signature(order.signature, secret, "supervisor", number):
        raise LaunchError(f"Who answers at {address} does not know the secret of this job.")
    return channel, order


def take_share(place: LaunchedPlace) -> Share:
    """Bind this process, and so its children, to the rank's share of the cores of its node."""
    share = share_of(
        available_processors(),
        intra_rank=0 if place.intra_rank is None else place.intra_rank,
        intra_size=1 if place.intra_size is None else place.intra_size,
    )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)
    return share


def script_environment(env: Mapping[str, str], share: Share) -> dict[str, str]:
    """What the script sees: as many threads as it has cores unless the user chose a number."""
    threads = env.get("OMP_NUM_THREADS") or str(share.num_threads)
    chosen = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",  # its output is a pipe: lines should arrive when they are written
    }
    given = {name: text for name, text in env.items() if name != channels.ADDRESS_VARIABLE}
    return {**chosen, **given, "OMP_NUM_THREADS": threads}


if __name__ == "__main__":
    sys.exit(main())
