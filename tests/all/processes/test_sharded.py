"""Models that are sharded inside of islands and exchanged between them, against one process."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.all.processes import sharded_script
from tests.all.processes.sharded_script import (
    BESIDE,
    COMPRESSED,
    EQUAL,
    NUM_STEPS,
    UNCOMPRESSED,
    WRONG,
    AsIsland,
    Side,
    State,
    loss_of,
)
from tests.all.processes.test_examples import EXAMPLES
from tests.all.processes.test_examples import run as run_example
from tests.limits import limit
from torchmn.testing import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = Path(sharded_script.__file__)
RANKS = range(4)
Results = Callable[[str], list[dict[str, Any]]]


def run(folder: Path, backend: str, *names: str) -> Results:
    """Run cases on four ranks; what each has returned."""
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "4", "--backend", backend,
         "--log-dir", str(folder / "logs"), str(SCRIPT), str(folder), *names],
        capture_output=True, text=True, timeout=limit(200), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return lambda name: [
        torch.load(folder / f"{name}.rank{rank}", weights_only=True) for rank in RANKS
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, in one job."""
    return run(
        tmp_path_factory.mktemp("gloo"),
        "gloo",
        *EQUAL,
        *COMPRESSED,
        *UNCOMPRESSED,
        *BESIDE,
        *WRONG,
        "resumed",
    )


def differences(got: list[State], expected: list[State]) -> list[float]:
    assert len(got) == len(expected)
    return [
        max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)
        for mine, theirs in zip(got, expected, strict=True)
    ]


@pytest.mark.parametrize("name", EQUAL)
def test_parameters_equal_one_process_at_every_step(results: Results, name: str) -> None:
    expected = EQUAL[name](Side())["states"]
    for rank in results(name):
        assert max(differences(rank["states"], expected)) < 2e-6


def test_mixed_precision_compiled_and_clipped_equals_hsdp(results: Results) -> None:
    for rank in results("beside_hsdp"):
        assert max(differences(rank["torchmn"], rank["hsdp"])) < 1e-6


def check_replicas(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    for other in others:
        assert differences(other["states"], first["states"]) == [0.0] * len(first["states"])


@pytest.mark.parametrize("name", COMPRESSED)
def test_islands_hold_the_same_and_learn(results: Results, name: str) -> None:
    check_replicas(results(name))
    assert results(name)[0]["after"] < 0.8 * results(name)[0]["before"]


@pytest.mark.parametrize("name", UNCOMPRESSED)
def test_an_island_is_what_one_rank_is(results: Results, name: str) -> None:
    """Two ranks that hold the whole model, each with the samples of an island."""
    expected, _ = run_ranks(lambda comm: UNCOMPRESSED[name](AsIsland(comm)), 2)
    check_replicas(results(name))
    assert max(differences(results(name)[0]["states"], expected["states"])) < 2e-6


def test_an_exchange_before_the_reduction_of_fully_shard_is_caught(results: Results) -> None:
    """The case of `plain_head` with an end of backward that comes too early."""
    expected = EQUAL["plain_head"](Side())["states"]
    assert all(max(differences(rank["states"], expected)) > 1e-3 for rank in results("too_early"))


def test_mistakes_are_refused_with_the_cure(results: Results) -> None:
    for rank in results("mistakes"):
        assert "RankMismatchError" in rank["all ranks"]
        assert "part (1,) of a mesh of (2,)" in rank["all ranks"]
        assert "as grid.data of torchmn.Grid" in rank["all ranks"]
        assert "RankMismatchError" in rank["bcast_data"]
        assert rank["server"].startswith("UnsupportedError")
        assert "Use 'every_step'" in rank["server"]


def test_uneven_batches_inside_of_an_island_are_named_with_the_cure(results: Results) -> None:
    side = Side()
    model = side.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(side, model, step).backward()
        optimizer.step()
        expected.append(side.whole(model))
    for rank in results("uneven_inside"):
        assert len(rank["plain"]) == 1
        assert "call optimizer.set_weight(average)" in rank["plain"][0]
        assert rank["cured"] == []
        assert max(differences(rank["states cured"], expected)) < 2e-6


def test_a_part_that_is_not_finite_ends_the_step_on_all_ranks(results: Results) -> None:
    errors = [rank["error"] for rank in results("torn")]
    assert all(error.startswith("NonFiniteGradientError") for error in errors), errors
    assert "first.weight" in errors[0]
    assert "a part of the model that another rank holds were not finite." in errors[1]


@pytest.mark.parametrize("grid", ["2x2", "1x4", "4x1", "dcp"])
def test_training_resumes_on_other_meshes(results: Results, grid: str) -> None:
    expected = EQUAL["plain"](Side())["states"][-1]
    for rank in results("resumed"):
        assert differences([rank["states"][grid]], [expected]) < [2e-6]


def test_under_mpi_torchs_groups_stand_beside_it(tmp_path: Path, backend: str) -> None:
    if backend == "gloo":
        pytest.skip(reason="the other tests do it over gloo")
    expected = EQUAL["plain"](Side())["states"]
    for rank in run(tmp_path, backend, "plain")("plain"):
        assert max(differences(rank["states"], expected)) < 2e-6


def losses(folder: Path, num_ranks: int, between: str) -> dict[str, float]:
    """What the example prints on rank 0."""
    launcher = ["-m", "torchmn", "run", "-n", str(num_ranks), "--backend", "gloo"]
    script = EXAMPLES / "model_parallel/train_sharded_transformer.py"
    options = ["--communicator", "flat", "--between", between, "--steps", "20", "--layers", "1"]
    lines, _ = run_example(
        [*launcher, "--log-dir", folder / "logs", script, *options, "--out", folder / between]
    )
    found = re.findall(r"(step \d+): loss ([0-9.]+)", "\n".join(lines))
    return {step: float(loss) for step, loss in found}


def test_the_example_learns_as_in_one_process(tmp_path: Path) -> None:
    alone = losses(tmp_path, 1, "float32")
    assert alone["step 20"] < alone["step 10"]
    found = losses(tmp_path, 4, "1bit")
    assert found.keys() == alone.keys()
    assert found["step 20"] == pytest.approx(alone["step 20"], rel=0.1)
