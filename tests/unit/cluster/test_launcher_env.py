"""Ranks read from the variables of launchers: tables, nestings, contradictions, hostile values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmn.cluster.hostlists import parse_task_counts
from torchmn.cluster.launcher_env import LAUNCHERS, raise_if_contradicted, read_launcher_env
from torchmn.errors import TopologyError

Env = dict[str, str]


def variables(**numbers: int) -> Env:
    return {name: str(number) for name, number in numbers.items()}


def torchrun(rank: int, size: int, *, local: int = 0, per_node: int = 1, agents: int = 1) -> Env:
    own = variables(RANK=rank, LOCAL_RANK=local, GROUP_RANK=rank // per_node)
    return own | variables(WORLD_SIZE=size, LOCAL_WORLD_SIZE=per_node, GROUP_WORLD_SIZE=agents)


def mpi(prefix: str, rank: int, size: int, local: int, per_node: int) -> Env:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local, per_node)
    return {f"{prefix}_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)}


def open_mpi(rank: int, size: int, *, local: int = 0, per_node: int = 1, daemon: int = 0) -> Env:
    uri = {"PMIX_SERVER_URI41": f"prterun-a.b-12@0.{daemon};tcp4://10.0.0.1:54859"}
    own = variables(OMPI_COMM_WORLD_NODE_RANK=local, PMIX_RANK=rank)
    return mpi("OMPI", rank, size, local, per_node) | own | uri


def mpich(rank: int, size: int, *, local: int = 0, per_node: int = 1) -> Env:
    node = variables(MPI_LOCALRANKID=local, MPI_LOCALNRANKS=per_node)
    return variables(PMI_RANK=rank, PMI_SIZE=size) | node


def pals(rank: int, *, local: int = 0, per_node: int = 1, node: int = 0) -> Env:
    own = variables(PALS_RANKID=rank, PALS_LOCAL_RANKID=local)
    return own | variables(PALS_LOCAL_SIZE=per_node, PALS_NODEID=node)


def mvapich(rank: int, size: int, *, local: int = 0, per_node: int = 1, mv: str = "MV2") -> Env:
    return mpi(mv, rank, size, local, per_node)


def slurm_job(tasks: int, nodes: int) -> Env:
    """What an sbatch script or a salloc shell sees."""
    return {
        **variables(SLURM_JOB_ID=17, SLURM_NTASKS=tasks, SLURM_NNODES=nodes),
        **variables(SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NODEID=0),
        "SLURM_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})",
    }


def slurm_step(
    rank: int, tasks: int, *, node: int = 0, nodes: int = 1, local: int = 0, step: str = "0"
) -> Env:
    return {
        **slurm_job(8, nodes),  # the job is larger than the step
        "SLURM_STEP_ID": step,
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})",
        **variables(SLURM_STEP_NUM_TASKS=tasks, SLURM_STEP_NUM_NODES=nodes),
        **variables(SLURM_PROCID=rank, SLURM_NODEID=node, SLURM_LOCALID=local),
    }


LAST_OF_8 = torchrun(7, 8, local=3, per_node=4, agents=2)
SECOND_NODE = slurm_step(1, 2, node=1, nodes=2)
# (environment, launcher, rank, size, intra_rank, intra_size, inter_rank, inter_size)
KNOWN = {
    "torchrun": (torchrun(5, 8, local=1, per_node=4, agents=2), "torchrun 5 8 1 4 1 2"),
    "variables set by hand": ({"RANK": "3", "WORLD_SIZE": "4"}, "torchrun 3 4 - - - -"),
    "Open MPI": (open_mpi(3, 4, local=1, per_node=2), "Open MPI 3 4 1 2 - -"),
    "MPICH": (mpich(3, 4, local=1, per_node=2), "MPICH 3 4 1 2 - -"),
    "Cray": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
        | pals(3, local=1, per_node=2, node=1),
        "MPICH 3 4 1 2 1 -",
    ),
    "MVAPICH2": (mvapich(3, 4, local=1, per_node=2), "MVAPICH 3 4 1 2 - -"),
    "MVAPICH3": (mvapich(3, 4, local=1, per_node=2, mv="MVP") | mpich(3, 4), "MVAPICH 3 4 1 2 - -"),
    "Slurm": (slurm_step(3, 4, node=1, nodes=2, local=1), "Slurm 3 4 1 2 1 2"),
    "Slurm, uneven": (
        slurm_step(2, 3, node=1, nodes=2) | {"SLURM_STEP_TASKS_PER_NODE": "2,1"},
        "Slurm 2 3 0 1 1 2",
    ),
    "Slurm with PMIx": (
        slurm_step(3, 4, node=1, nodes=2, local=1) | {"PMIX_RANK": "3"},
        "Slurm 3 4 1 2 1 2",
    ),
    "Slurm with PMI 2": (
        slurm_step(3, 4, node=1, nodes=2, local=1) | {"PMI_RANK": "3", "PMI_SIZE": "4"},
        "MPICH 3 4 1 2 1 2",
    ),
    "mpirun in a batch script": (
        slurm_job(4, 2) | open_mpi(3, 4, local=1, per_node=2, daemon=1),
        "Open MPI 3 4 1 2 - -",
    ),
    "mpirun in a salloc shell that is a step": (
        slurm_step(0, 1, step=str(0xFFFFFFFA)) | open_mpi(3, 4, local=1, per_node=2),
        "Open MPI 3 4 1 2 - -",
    ),
    "mpirun in srun --pty bash": (
        slurm_step(0, 1) | open_mpi(3, 4, local=3, per_node=4),
        "Open MPI 3 4 3 4 - -",
    ),
    "mpirun whose daemons srun started": (
        SECOND_NODE | open_mpi(5, 8, local=1, per_node=4, daemon=2),
        "Open MPI 5 8 1 4 - -",
    ),
    "mpiexec whose proxies srun started": (
        SECOND_NODE | mpich(5, 8, local=1, per_node=4),
        "MPICH 5 8 1 4 - -",
    ),
    "torchrun agents by mpirun": (open_mpi(1, 2) | LAST_OF_8, "torchrun 7 8 3 4 1 2"),
    "torchrun agents by mpirun, in another order": (
        open_mpi(0, 2) | LAST_OF_8,
        "torchrun 7 8 3 4 1 2",
    ),
    "torchrun agents of one rank by mpirun": (
        open_mpi(3, 4) | torchrun(1, 4, agents=4),
        "torchrun 1 4 0 1 1 4",
    ),
    "torchrun agents by srun": (SECOND_NODE | LAST_OF_8, "torchrun 7 8 3 4 1 2"),
    "torchrun agents by srun with PMIx": (
        SECOND_NODE | {"PMIX_RANK": "1"} | LAST_OF_8,
        "torchrun 7 8 3 4 1 2",
    ),
    "one torchrun in mpirun -n 1": (
        open_mpi(0, 1) | torchrun(3, 4, local=3, per_node=4),
        "torchrun 3 4 3 4 0 1",
    ),
    "wrapper that copies mpirun's variables": (
        open_mpi(3, 4, local=1, per_node=2) | {"RANK": "3", "WORLD_SIZE": "4"},
        "torchrun 3 4 1 2 - -",
    ),
    "wrapper that shows each rank one GPU": (
        open_mpi(3, 4, local=1, per_node=2)
        | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        "torchrun 3 4 0 1 - -",
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_launchers(case: str) -> None:
    env, expected = KNOWN[case]
    place = read_launcher_env(env)
    assert place is not None
    found = (
        *(place.launcher, place.rank, place.size, place.intra_rank, place.intra_size),
        *(place.inter_rank, place.inter_size),
    )
    assert " ".join("-" if each is None else str(each) for each in found) == expected


@pytest.mark.parametrize(
    "env",
    [{}, {"PATH": "/bin"}, slurm_job(4, 2), {"RANK": "", "WORLD_SIZE": ""}]
    + [slurm_step(0, 4, step=str(special)) for special in (0xFFFFFFFA, 0xFFFFFFFB, 0xFFFFFFFC)],
)
def test_no_launcher(env: Env) -> None:
    assert read_launcher_env(env) is None


# (environment, what the message must hold)
CONTRADICTIONS = {
    "four torchruns by mpirun": (
        open_mpi(2, 4) | torchrun(0, 1),
        "RANK=0, WORLD_SIZE=1, OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=4, --nnodes 4",
    ),
    "four torchruns by mpirun, rank 0": (
        open_mpi(0, 4) | torchrun(0, 1),
        "WORLD_SIZE=1, OMPI_COMM_WORLD_SIZE=4",
    ),
    "two worlds of two that look like one": (
        open_mpi(0, 2, per_node=2) | torchrun(0, 2, per_node=2, agents=1),
        "WORLD_SIZE=2, OMPI_COMM_WORLD_SIZE=2, --standalone",
    ),
    "torchruns by srun": (
        slurm_step(1, 4) | torchrun(0, 2, per_node=2),
        "WORLD_SIZE=2, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4",
    ),
    "mpiruns by srun on one node": (
        slurm_step(1, 4) | open_mpi(0, 2, per_node=2),
        "OMPI_COMM_WORLD_SIZE=2, SLURM_STEP_NUM_TASKS=4",
    ),
    "mpiruns by srun, one on each node": (
        SECOND_NODE | open_mpi(0, 2, per_node=2, daemon=0),
        "OMPI_COMM_WORLD_SIZE=2, SLURM_STEP_NUM_TASKS=2",
    ),
    "PMIx of another launcher": (
        open_mpi(2, 4) | {"PMIX_RANK": "3"},
        "OMPI_COMM_WORLD_RANK=2, PMIX_RANK=3",
    ),
    "PALS of another launcher": (mpich(2, 4) | pals(3), "PMI_RANK=2, PALS_RANKID=3"),
    "left over from a shell": (
        {"RANK": "0", "WORLD_SIZE": "8"} | open_mpi(1, 2),
        "RANK=0, WORLD_SIZE=8, OMPI_COMM_WORLD_RANK=1, unset",
    ),
    "PMIx rank beyond the agents": (
        {"PMIX_RANK": "5"} | torchrun(1, 4, agents=4),
        "RANK=1, PMIX_RANK=5",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str) -> None:
    env, texts = CONTRADICTIONS[case]
    with pytest.raises(TopologyError) as caught:
        read_launcher_env(env)
    for text in texts.split(", "):
        assert text in str(caught.value)


# (change to a good environment, variables and texts the message must hold)
HOSTILE = {
    "no number": ({"RANK": "first"}, "RANK, 'first'"),
    "negative": ({"RANK": "-1"}, "RANK, '-1'"),
    "fraction": ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE, '4.0'"),
    "no rank": ({"WORLD_SIZE": "0"}, "WORLD_SIZE, '0'"),
    "rank beyond size": ({"RANK": "4"}, "RANK is 4, WORLD_SIZE is 4, 0 to 3"),
    "local rank beyond size": ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, LOCAL_WORLD_SIZE is 2"),
    "group beyond size": ({"GROUP_RANK": "9"}, "GROUP_RANK is 9, GROUP_WORLD_SIZE is 2"),
    "no size": ({"WORLD_SIZE": ""}, "RANK is '1', WORLD_SIZE is not set"),
    "size only": ({"RANK": ""}, "WORLD_SIZE is '4', RANK is not set"),
    "other digits": ({"RANK": "\u0663"}, "RANK"),
    "local rank is no number": ({"LOCAL_RANK": "x"}, "LOCAL_RANK, 'x'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_values_are_named(case: str) -> None:
    change, texts = HOSTILE[case]
    with pytest.raises(TopologyError) as caught:
        read_launcher_env(torchrun(1, 4, local=1, per_node=2, agents=2) | change)
    for text in texts.split(", "):
        assert text in str(caught.value)


@pytest.mark.parametrize("env", [{"PMIX_RANK": "2"}, pals(2), pals(2) | {"PMIX_RANK": "2"}])
def test_rank_without_size_is_known_and_its_size_is_refused(env: Env) -> None:
    place = read_launcher_env(env)
    assert place is not None
    assert (place.rank, place.known_size) == (2, None)
    with pytest.raises(TopologyError, match="not how many ranks"):
        _ = place.size
    raise_if_contradicted(place, rank=2, size=5, source="MPI.COMM_WORLD")
    with pytest.raises(TopologyError, match="rank 1 of 5"):
        raise_if_contradicted(place, rank=1, size=5, source="MPI.COMM_WORLD")


def test_library_that_sees_another_world() -> None:
    raise_if_contradicted(None, rank=0, size=1, source="MPI.COMM_WORLD")
    launched = read_launcher_env(slurm_step(2, 4))
    raise_if_contradicted(launched, rank=2, size=4, source="MPI.COMM_WORLD")
    with pytest.raises(TopologyError) as caught:
        raise_if_contradicted(launched, rank=0, size=1, source="MPI.COMM_WORLD")
    for text in ("SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=4", "MPI.COMM_WORLD", "rank 0 of 1"):
        assert text in str(caught.value)
    assert "srun --mpi=pmix" in str(caught.value)


@given(
    st.dictionaries(
        st.sampled_from(
            [name for row in LAUNCHERS for name in (*row.rank, *row.size, *row.intra_rank)]
            + ["SLURM_STEP_ID", "GROUP_WORLD_SIZE", "SLURM_TASKS_PER_NODE", "SLURM_NODEID"]
        ),
        st.sampled_from(["0", "1", "2", "3", "", "x", "-1", "2(x2)", "99999999999"]),
        max_size=6,
    )
)
def test_any_environment_gives_a_place_inside_its_world_or_our_error(env: Env) -> None:
    try:
        place = read_launcher_env(env)
    except TopologyError:
        return
    if place is not None and place.known_size is not None:
        assert 0 <= place.rank < place.known_size


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(3)", "2,,1", "-1"])
def test_tasks_per_node_of_another_form(text: str) -> None:
    with pytest.raises(TopologyError, match="2\\(x3\\),1"):
        parse_task_counts(text)
