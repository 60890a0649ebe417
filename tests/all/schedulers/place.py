"""Writes down where each rank of a job is, and exits: FOLDER [STATUS]."""

import json
import socket
import sys
from pathlib import Path

import torch

import torchmn


def main(folder: Path, status: int = 0) -> None:
    comm = torchmn.create_communicator("naive")
    own = [comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size]
    total = float(comm.allreduce(torch.ones(1)))
    (folder / f"{comm.rank}.json").write_text(json.dumps([socket.gethostname(), *own, total]))
    sys.exit(status)


def places(folder: Path) -> list[list[object]]:
    """What the ranks have written: host, place, and the sum of a one of each."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def are_two_on_each(folder: Path) -> bool:
    """Whether there were two ranks on each of two nodes, in any order of the nodes."""
    found = places(folder)
    first, second = ("n1", "n2") if found and found[0][0] == "n1" else ("n2", "n1")
    return found == [
        *([first, 0, 4, 0, 2, 0, 2, 4.0], [first, 1, 4, 1, 2, 0, 2, 4.0]),
        *([second, 2, 4, 0, 2, 1, 2, 4.0], [second, 3, 4, 1, 2, 1, 2, 4.0]),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
