"""``python -m torchmn.testing.netlab``: test hosts that stand until they are told to go."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from torchmn.script import run_main
from torchmn.testing.netlab.lab import Lab, netlab
from torchmn.testing.netlab.leftovers import end_lab, living_labs, sweep


def main(args: Sequence[str] | None = None) -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(
        prog="python -m torchmn.testing.netlab",
        description="Hosts in network namespaces on this machine, with shaped links. Needs root.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make hosts that stand until Ctrl-C, SIGTERM or down")
    up.add_argument("num_hosts", nargs="?", type=int, default=2, metavar="HOSTS")
    up.add_argument("--rate", default="1gbit", help="of every link, or 'none' (default: 1gbit)")
    up.add_argument(
        "--cores",
        type=int,
        nargs="+",
        metavar="CORE",
        help="one core for each host; they are dealt out in turn",
    )
    up.set_defaults(do=_up)
    down = commands.add_parser("down", help="end hosts that 'up' made, and what dead owners left")
    down.set_defaults(do=_down)
    chosen = parser.parse_args(args)
    chosen.do(chosen)


def _up(chosen: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    dealt = chosen.cores or [None]
    cores = [
        None if (core := dealt[i % len(dealt)]) is None else {core} for i in range(chosen.num_hosts)
    ]
    rate = None if chosen.rate == "none" else chosen.rate
    try:
        with netlab(chosen.num_hosts, rate, cores=cores, is_standing=True) as lab:
            print(_described(lab), flush=True)
            lab.keeper.wait()
    except KeyboardInterrupt:
        return


def _leave(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _described(lab: Lab) -> str:
    lines = [
        f"{host.name}  {host.address}  {lab.rates[host.index] or 'no limit'}" for host in lab.hosts
    ]
    lines += [
        "",
        f"Enter a host with    {lab.rsh_agent} n0 [COMMAND]",
        f"mpirun on a host     --hostfile {lab.hostfile()} --prtemca plm_ssh_agent {lab.rsh_agent} "
        f"--prefix {sys.prefix}",
        f"End it with          Ctrl-C, kill {os.getpid()} or python -m torchmn.testing.netlab down",
    ]
    return "\n".join(lines)


def _down(_: argparse.Namespace) -> None:
    standing = [lab for lab in living_labs() if lab.is_standing]
    for lab in standing:
        end_lab(lab)
    print(f"Ended {len(standing)} standing, removed {len(sweep())} left behind.")


if __name__ == "__main__":
    run_main(main)
