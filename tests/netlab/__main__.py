"""``python -m tests.netlab``: test hosts that run until they are ended."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tests.netlab.cleanup import end_lab, running_labs, sweep
from tests.netlab.lab import Lab, netlab
from torchmn.control.script import run_main


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.netlab",
        description="Hosts in network namespaces on this machine, with shaped links. Needs root.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="create hosts that run until Ctrl-C, SIGTERM or down")
    up.add_argument("num_hosts", nargs="?", type=int, default=2, metavar="HOSTS")
    up.add_argument("--rate", default="1gbit", help="of every link, or 'none' (default: 1gbit)")
    up.add_argument(
        "--cores",
        type=int,
        nargs="+",
        metavar="CORE",
        help="one core for each host, assigned in turn",
    )
    up.set_defaults(do=_up)
    down = commands.add_parser(
        "down", help="end hosts created by 'up', and remove those of dead owners"
    )
    down.set_defaults(do=_down)
    chosen = parser.parse_args(args)
    chosen.do(chosen)


def _up(chosen: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    available = chosen.cores or [None]
    cores = [
        None if (core := available[i % len(available)]) is None else {core}
        for i in range(chosen.num_hosts)
    ]
    rate = None if chosen.rate == "none" else chosen.rate
    try:
        with netlab(chosen.num_hosts, rate, cores=cores, persistent=True) as lab:
            print(_described(lab), flush=True)
            lab.supervisor.wait()
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
        f"--prefix {shlex.quote(sys.prefix)}",
        f"End it with          Ctrl-C, kill {os.getpid()} or python -m tests.netlab down",
    ]
    return "\n".join(lines)


def _down(_: argparse.Namespace) -> None:
    ended = [lab for lab in running_labs() if lab.persistent]
    for lab in ended:
        end_lab(lab)
    print(f"Ended {len(ended)} labs, removed {len(sweep())} of dead owners.")


if __name__ == "__main__":
    run_main(main)
