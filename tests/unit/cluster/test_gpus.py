"""Cores next to GPUs, on trees of files as sysfs and the driver show them."""

from pathlib import Path

import pytest

from torchmn.cluster.cpus import Processors, cores_near_gpu
from torchmn.cluster.gpus import (
    count_gpus,
    gpu_localities,
    memory_nodes,
    shared_gpu_problem,
    shared_gpu_variables,
)

BUSES = {"0000:07:00.0": ("0-3", 0), "0000:0a:00.0": ("0-3", 0), "0000:87:00.0": ("4-7", 1)}
EIGHT = Processors(logical=tuple(range(8)), physical=tuple((n // 4, n) for n in range(8)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for bus, (cores, node) in BUSES.items():
        (tmp_path / "proc/driver/nvidia/gpus" / bus.upper()).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
        (device / "numa_node").write_text(f"{node}\n")
    for node, cores in ((0, "0-3"), (1, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return tmp_path


def cores_of(root: Path, intra_size: int, env: dict[str, str] | None = None) -> list[list[int]]:
    around = gpu_localities(env or {}, root)
    return [
        sorted(cores_near_gpu(EIGHT, around, intra_rank=rank, intra_size=intra_size)[0].cores)
        for rank in range(intra_size)
    ]


def test_ranks_whose_gpus_share_a_socket_divide_it(root: Path) -> None:
    assert cores_of(root, 3) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert cores_of(root, 2) == [[0, 1], [2, 3]]


def test_visible_devices_give_the_order(root: Path) -> None:
    assert cores_of(root, 2, {"CUDA_VISIBLE_DEVICES": "2,0"}) == [[4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("visible", ["", "GPU-abc,GPU-def", "5,0"])
def test_without_known_gpus_all_cores_are_divided(root: Path, visible: str) -> None:
    found = cores_of(root, 2, {"CUDA_VISIBLE_DEVICES": visible})
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_more_ranks_than_gpus_divide_all_cores(root: Path) -> None:
    assert cores_of(root, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_no_core_next_to_a_gpu_may_be_ours(root: Path) -> None:
    first = Processors(logical=(0, 1), physical=((0, 0), (0, 1)))
    around = gpu_localities({"CUDA_VISIBLE_DEVICES": "2"}, root)
    share, beside = cores_near_gpu(first, around, intra_rank=0, intra_size=1)
    assert (share.cores, beside) == (frozenset({0, 1}), None)


def test_the_quota_is_divided_as_the_ranks_are(root: Path) -> None:
    limited = Processors(logical=EIGHT.logical, physical=EIGHT.physical, quota=3.0)
    around = gpu_localities({}, root)
    threads = [
        cores_near_gpu(limited, around, intra_rank=rank, intra_size=3)[0].num_threads
        for rank in range(3)
    ]
    assert threads == [1, 1, 1]


def test_memory_nodes(root: Path) -> None:
    assert memory_nodes(frozenset({1, 2}), root) == (0,)
    assert memory_nodes(frozenset({3, 4}), root) == (0, 1)
    assert memory_nodes(frozenset({1}), root / "nothing") == ()


# ---- gPUs are counted from device files and CUDA_VISIBLE_DEVICES ----


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 3),
        ("", 0),
        ("0,2", 2),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-x", 1),
        ("none", 0),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0-x"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(env, tmp_path) == expected


def test_no_devices(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, tmp_path) == 0


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "may_share", "text"),
    [
        (2, 2, False, ""),
        (1, 1, False, ""),
        (3, 1, True, ""),
        (3, 2, False, "the 3 ranks (TORCHMN_SHARE_GPU=1 lets them share one, for tests)"),
        (2, 0, True, "NCCL needs a GPU for each of the 2 ranks"),
        (1, 0, False, "NCCL needs a GPU for each of the 1 rank"),
    ],
)
def test_why_nccl_refuses_ranks(num_ranks: int, num_gpus: int, may_share: bool, text: str) -> None:
    found = shared_gpu_problem(num_ranks, num_gpus, may_share=may_share)
    assert found.endswith(text)
    assert bool(found) == bool(text)


def test_nccl_is_prepared_for_a_shared_gpu_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmn.cluster.gpus.version", lambda package: "2.28.9")
    assert shared_gpu_variables({"TORCHMN_SHARE_GPU": "0"}, "1") == {}
    asked = {"TORCHMN_SHARE_GPU": "1"}
    first, second = (shared_gpu_variables(asked, rank) for rank in "01")
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert shared_gpu_variables({**asked, "NCCL_HOSTID": "x"}, "1").keys() == {
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "NCCL_SOCKET_IFNAME",
    }
    monkeypatch.setattr("torchmn.cluster.gpus.version", lambda package: "2.30.7")
    assert shared_gpu_variables(asked, "1") == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
