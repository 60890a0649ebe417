"""The choice of a backend is a function of facts."""

import sys
from pathlib import Path

import pytest

from torchmn.errors import UnknownNameError, UnsupportedError
from torchmn.run.backend import Machine, choose_backend, find_mpirun

WITH_MPI = {"mpirun": "/usr/bin/mpirun", "has_mpi4py": True}

# (machine, wanted, number of ranks, backend)
CHOICES = {
    "plain": (Machine(), "auto", 2, "gloo"),
    "MPI": (Machine(**WITH_MPI), "auto", 2, "mpi"),
    "mpirun alone": (Machine(mpirun="/usr/bin/mpirun"), "auto", 2, "gloo"),
    "mpi4py alone": (Machine(has_mpi4py=True), "auto", 2, "gloo"),
    "GPUs": (Machine(num_gpus=2, **WITH_MPI), "auto", 2, "nccl"),
    "too few GPUs": (Machine(num_gpus=1, **WITH_MPI), "auto", 2, "mpi"),
    "too few GPUs, no MPI": (Machine(num_gpus=1), "auto", 2, "gloo"),
    "gloo requested": (Machine(num_gpus=2, **WITH_MPI), "gloo", 2, "gloo"),
    "mpi requested": (Machine(num_gpus=2, **WITH_MPI), "mpi", 2, "mpi"),
    "nccl requested": (Machine(num_gpus=2), "nccl", 2, "nccl"),
    "a shared GPU": (Machine(num_gpus=1, can_share_gpus=True), "auto", 3, "nccl"),
    "a shared GPU requested": (Machine(num_gpus=1, can_share_gpus=True), "nccl", 3, "nccl"),
    "no GPU to share": (Machine(can_share_gpus=True), "auto", 2, "gloo"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case: str) -> None:
    machine, wanted, num_ranks, expected = CHOICES[case]
    backend, why = choose_backend(wanted, machine, num_ranks)
    assert backend == expected
    assert why


def test_reason_names_what_is_missing() -> None:
    assert choose_backend("auto", Machine(), 1)[1] == "no GPU, no MPI"
    assert "no MPI: an mpirun missing" in choose_backend("auto", Machine(has_mpi4py=True), 1)[1]
    assert "fewer GPUs (1) than ranks" in choose_backend("auto", Machine(num_gpus=1), 2)[1]


def test_an_mpirun_that_cannot_reach_the_hosts_is_not_chosen() -> None:
    machine = Machine(**WITH_MPI)
    backend, why = choose_backend("auto", machine, 2, mpi_problem="it has a blank")
    assert (backend, why) == ("gloo", "no GPU, no MPI: it has a blank")
    with pytest.raises(UnsupportedError, match="it has a blank. Or use --backend gloo"):
        choose_backend("mpi", machine, 2, mpi_problem="it has a blank")


@pytest.mark.parametrize(
    ("machine", "wanted", "words"),
    [
        (Machine(), "nccl", "no CUDA GPU: start fewer ranks, or use backend gloo or mpi"),
        (
            Machine(num_gpus=1),
            "nccl",
            "for each of the 2 ranks (TORCHMN_SHARE_GPU=1 lets them share one, for tests), and "
            "this machine has 1 CUDA GPU: start fewer",
        ),
        (Machine(), "mpi", "needs an mpirun and mpi4py"),
        (Machine(has_mpi4py=True), "mpi", "needs an mpirun, which"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(
    machine: Machine, wanted: str, words: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose_backend(wanted, machine, 2)
    assert words in str(caught.value)


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="auto, gloo, nccl, mpi"):
        choose_backend("smoke", Machine(), 1)


def test_mpirun_is_found_on_the_path(tmp_path: Path) -> None:
    if (Path(sys.executable).parent / "mpirun").exists():
        assert find_mpirun({"PATH": ""}) == str(Path(sys.executable).parent / "mpirun")
        return
    assert find_mpirun({"PATH": str(tmp_path)}) is None
    tool = tmp_path / "mpirun"
    tool.touch(mode=0o755)
    assert find_mpirun({"PATH": str(tmp_path)}) == str(tool)
