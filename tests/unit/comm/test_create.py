"""From a name to a communicator, or an error on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.limits import limit
from tests.unit.comm.ranks import run_transports
from torchmn import create_communicator
from torchmn.cluster import Topology
from torchmn.comm import Timeout
from torchmn.comm.create import gpus_in_use
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.errors import (
    RankMismatchError,
    TopologyError,
    UnknownNameError,
    UnsupportedError,
    UsageError,
)
from torchmn.testing import run_ranks


def alone() -> TorchDistributedTransport:
    return TorchDistributedTransport(HashStore(), 0, 1, timeout_s=limit(5))


def test_only_rank_0_prints_where_ranks_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks are threads here, which share the stream: rank 1 drops what is printed."""
    before = sys.stdout

    def rank_main(transport: TorchDistributedTransport) -> None:
        comm = create_communicator(
            "naive", transport=transport, topology=Topology(("localhost",) * 2), quiet=True
        )
        comm.barrier()
        print("dropped")
        print("shown", file=sys.stderr)
        comm.barrier()
        comm.finalize()

    run_transports(rank_main, 2)
    assert sys.stdout is before
    create_communicator("naive", transport=alone(), quiet=True).finalize()
    print("rank 0")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("rank 0\n", "shown\nshown\n")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        create_communicator("ring")
    for name in ("'ring'", "auto", "naive", "flat", "hierarchical", "two_dimensional", "pure_nccl"):
        assert name in str(caught.value)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_an_invalid_time_limit_is_rejected(seconds: float) -> None:
    with pytest.raises(UsageError, match="^timeout_s=.* must be a finite number of seconds, or 0"):
        create_communicator(transport=alone(), timeout_s=seconds)
    with pytest.raises(UsageError, match="first_s must be a positive, finite number"):
        Timeout(first_s=seconds)


@pytest.mark.parametrize(
    ("timeout_s", "usual_s", "first_s"),
    [(7, 7, 35), (Timeout(first_s=3), 60, 3), (0, None, None)],
    ids=["a number", "both", "none"],
)
def test_the_first_exchange_has_a_longer_limit_and_zero_is_none(
    timeout_s: object, usual_s: float | None, first_s: float | None
) -> None:
    comm = create_communicator("naive", transport=alone(), timeout_s=timeout_s)
    if usual_s is None:
        assert min(comm.timeout_s, comm.world.limit_s) > 24 * 3600
    else:
        assert (comm.timeout_s, comm.world.limit_s) == (usual_s, first_s)
    comm.finalize()


def test_an_unknown_gradient_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'int8'. Known: float32, float16, bfloat16"):
        create_communicator(transport=alone(), allreduce_grad_dtype=torch.int8)


def test_a_topology_of_another_size_is_rejected() -> None:
    with pytest.raises(TopologyError, match="given topology has 2 ranks, the world has 1"):
        create_communicator(transport=alone(), topology=Topology(("a", "b")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_gradient_dtypes_by_name_and_as_dtypes(dtype: object) -> None:
    comm = create_communicator("naive", transport=alone(), allreduce_grad_dtype=dtype)
    assert comm.codec.name == "bfloat16"
    comm.finalize()


def test_ranks_with_different_arguments_raise() -> None:
    def rank_main(transport: TorchDistributedTransport) -> None:
        name = "naive" if transport.rank else "flat"
        text = "different name: rank 0: 'flat'; rank 1: 'naive'"
        with pytest.raises(RankMismatchError, match=text):
            create_communicator(name, transport=transport, timeout_s=limit(5))

    run_transports(rank_main, 2)


def test_a_rank_knows_its_place() -> None:
    def rank_main(comm):
        assert comm.host == ("a", "b", "a")[comm.rank]
        assert comm.device == torch.device("cpu")
        return comm.rank, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size

    places = run_ranks(rank_main, 3, topology=Topology(("a", "b", "a")))
    assert places == [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 2)]


@pytest.mark.slow
def test_a_script_without_a_main_guard_raises_in_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "import multiprocessing, torchmn\n"
        "comm = torchmn.create_communicator('naive')\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    print('worker ended with', worker.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=limit(50), check=True
    )
    assert "worker ended with 1" in done.stdout
    assert "UsageError: create_communicator() was called while a process" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


@pytest.mark.parametrize(
    ("ranks_per_node", "seen", "used"),
    [
        ([3, 1], [["a", "b"]] * 3 + [["c", "d"]], ["a", "b", "a", "c"]),
        ([2], [["a"], ["b"]], ["a", "b"]),
        ([2], [[], []], []),
    ],
    ids=["in turn", "each sees only its own", "none anywhere"],
)
def test_gpus_of_ranks(ranks_per_node: list[int], seen: list[list[str]], used: list[str]) -> None:
    assert gpus_in_use(Topology.blocks(ranks_per_node), seen) == used


def test_some_ranks_have_a_gpu_and_some_have_none() -> None:
    topology = Topology(("left", "right"))
    with pytest.raises(UnsupportedError, match="rank 1 on right finds no GPU and rank 0 on left"):
        gpus_in_use(topology, [["a"], []])
