"""Another number of workers: who gets whose state, and which random numbers come next."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchmn
from tests.unit.checkpoint.training import (
    Holder,
    assert_same,
    checkpointer_of,
    on_ranks,
    saved,
    train,
    with_warnings,
)
from torchmn.checkpoint.parts import nowhere, place_parts
from torchmn.comm.local_tensors import PART
from torchmn.data import rng_state
from torchmn.errors import CheckpointWarning, DataError, UsageError

CPU = torch.device("cpu")


class Shards(Holder):
    """Keeps a part of 0..11 on each rank."""

    def reshard_state_dict(self, states: Sequence[Any], comm: torchmn.Communicator) -> Any:
        whole = torch.cat([state["part"] for state in states])
        return {"part": whole.tensor_split(comm.size)[comm.rank].clone(), "from": len(states)}

    def resume_warnings(self) -> list[str]:
        return ["the parts are other parts now."]


def save(path: Path, num_ranks: int) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        part = torch.arange(12).tensor_split(comm.size)[comm.rank]
        state = {"shards": Shards({"part": part, "from": 0}), "plain": Holder([comm.rank])}
        saved(comm, path, 4, state)

    on_ranks(rank_main, num_ranks)


def load(path: Path, num_ranks: int) -> list[Any]:
    def rank_main(comm: torchmn.Communicator) -> Any:
        checkpointer, warned = with_warnings(comm, path)
        shards, plain = Shards(), Holder()
        step = checkpointer.resume({"shards": shards, "plain": plain})
        return step, shards.state["part"].tolist(), shards.state["from"], plain.state, warned

    return on_ranks(rank_main, num_ranks)


@pytest.mark.parametrize("new", [1, 2, 3, 4])
@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_from_old_to_new(tmp_path: Path, old: int, new: int) -> None:
    save(tmp_path, old)
    results = load(tmp_path, new)
    assert [step for step, *_ in results] == [4] * new
    assert sum((part for _, part, *_ in results), []) == list(range(12))
    is_same = old == new
    assert {num for _, _, num, *_ in results} == {0 if is_same else old}
    ranks = [plain[0] for *_, plain, _ in results]
    assert ranks == (list(range(new)) if is_same else [0] * new)
    assert results[0][-1] == ([] if is_same else ["the parts are other parts now."])
    assert all(warned == [] for *_, warned in results[1:])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_random_numbers_continue() -> None:
    before = rng_state.capture(CPU)
    try:
        expected = draw()
        draw()
        rng_state.restore(before, CPU)
        assert draw() == expected
        rng_state.start(1, 5, 3, CPU)
        new = draw()
        assert new != expected
        rng_state.start(1, 5, 3, CPU)
        assert draw() == new
        for other in ((2, 5, 3), (1, 6, 3), (1, 5, 2)):
            rng_state.start(*other, CPU)
            assert not set(draw()) & set(new)
    finally:
        rng_state.restore(before, CPU)


def test_random_numbers_of_a_resumed_run(tmp_path: Path) -> None:
    def save_and_draw(comm: torchmn.Communicator) -> Any:
        saved(comm, tmp_path, 1, {})
        return draw()

    def resume_and_draw(comm: torchmn.Communicator) -> Any:
        torch.manual_seed(99)
        checkpointer_of(comm, tmp_path).resume({})
        return draw()

    before = rng_state.capture(CPU)
    try:
        expected = on_ranks(save_and_draw, 1)
        assert on_ranks(resume_and_draw, 1) == expected
    finally:
        rng_state.restore(before, CPU)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (1, 3)])
def test_a_training_continues_with_another_number_of_workers(
    tmp_path: Path, old: int, new: int
) -> None:
    """With residuals, which the optimizer shares out; all ranks have the same model."""
    train(tmp_path, old, 2)
    with pytest.warns(CheckpointWarning, match="1bit.residual"):  # what does not hold exactly
        results = train(tmp_path, new, 4)
    assert [start for start, _ in results] == [2] * new
    assert_same(results[1:], [results[0]] * (new - 1))
    with pytest.warns(CheckpointWarning, match="1bit.residual"):
        assert [start for start, _ in train(tmp_path, old, 4)] == [4] * old


# ---- what cannot be continued ----


PLAIN = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1),
}


def optimizer_of(name: str, model: torch.nn.Module, comm: torchmn.Communicator) -> Any:
    """A plain optimizer, or with "multi-node " before its name one that is wrapped."""
    inner = PLAIN[name.removeprefix("multi-node ")](model.parameters())
    is_plain = name in PLAIN
    return inner if is_plain else torchmn.create_multi_node_optimizer(inner, comm, model)


def one_step(path: Path, name: str, num_ranks: int) -> list[Any]:
    """Resume, take a step, save: the step it resumed at, or the error, and the model's values."""

    def rank_main(comm: torchmn.Communicator) -> Any:
        model = torch.nn.Linear(3, 2)
        state = {"model": model, "optimizer": optimizer_of(name, model, comm)}
        before = [p.detach().clone() for p in model.parameters()]
        checkpointer = checkpointer_of(comm, path)
        try:
            step = checkpointer.resume(state)
        except UsageError as error:
            is_unchanged = all(
                torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)
            )
            return str(error), is_unchanged
        model(torch.ones(4, 3)).sum().backward()
        state["optimizer"].step()
        checkpointer.save(step + 1, state)
        checkpointer.finish()
        return step

    return on_ranks(rank_main, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [("SGD", "Adam"), ("multi-node SGD", "multi-node Adam"), ("multi-node Adam", "SGD")],
)
def test_another_class_of_optimizer(
    tmp_path: Path, before: str, after: str, num_ranks: int
) -> None:
    """One message instead of a KeyError in the first step, and nothing is loaded."""
    assert one_step(tmp_path, before, 1) == [0]
    first, second = (name.removeprefix("multi-node ") for name in (before, after))
    for text, is_unchanged in one_step(tmp_path, after, num_ranks):
        assert f"saved by {first} and cannot be loaded by {second}" in text
        assert ("betas" if second == "Adam" else "momentum") in text
        assert is_unchanged


def test_optimizers_with_the_same_options(tmp_path: Path) -> None:
    assert one_step(tmp_path, "multi-node Adam", 2) == [0, 0]
    assert one_step(tmp_path, "multi-node AdamW", 2) == [1, 1]


def test_optimizer_of_another_class_without_a_checkpointer(tmp_path: Path) -> None:
    def rank_main(comm: torchmn.Communicator) -> None:
        model = torch.nn.Linear(3, 2)
        state = optimizer_of("multi-node SGD", model, comm).state_dict()
        with pytest.raises(UsageError, match="saved by SGD and cannot be loaded by Adam"):
            optimizer_of("multi-node Adam", model, comm).load_state_dict(state)

    on_ranks(rank_main, 1)


@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_plain_loop_over_fixed_shards(tmp_path: Path, num_new: int) -> None:
    """scatter_dataset and a DataLoader, of which the checkpointer knows nothing."""

    def rank_main(comm: torchmn.Communicator) -> list[str]:
        model = torch.nn.Linear(1, 1)
        torch.utils.data.DataLoader(torchmn.scatter_dataset(list(range(12)), comm), 2)
        torchmn.scatter_dataset(list(range(4)), comm)  # of the evaluation
        checkpointer, warned = with_warnings(comm, tmp_path)
        checkpointer.resume({"model": model})
        checkpointer.save(1, {"model": model})
        checkpointer.finish()
        return warned

    assert on_ranks(rank_main, 2) == [[], []]
    first, *others = on_ranks(rank_main, num_new)
    assert others == [[]] * (num_new - 1)
    assert len(first) == (num_new != 2)
    assert all("shards hold different samples" in text for text in first)


def parallel_layer(
    comm: torchmn.Communicator, path: Path, is_plain: bool, seed: int = 0
) -> tuple[Any, dict[str, Any]]:
    """A checkpointer without a grid, and what it saves: parts on pairs of ranks."""
    grid = torchmn.Grid(comm, data=-1, model=2)
    layer = torchmn.links.ParallelLinear(3, 4, grid.model)
    with torch.no_grad():
        layer.weight.fill_(grid.model.rank + seed)
    optimizer: Any = torch.optim.SGD(layer.parameters(), lr=0.1)
    if not is_plain:
        optimizer = torchmn.create_multi_node_optimizer(optimizer, grid.data, layer)
    return checkpointer_of(comm, path), {"optimizer": optimizer, "model": layer}


@pytest.mark.parametrize("is_plain", [True, False])
def test_parts_of_layers_without_a_grid(tmp_path: Path, is_plain: bool) -> None:
    """They are no replicas, and only ranks with the same numbers have the same parts."""

    def save(comm: torchmn.Communicator) -> None:
        checkpointer, state = parallel_layer(comm, tmp_path, is_plain)
        checkpointer.save(3, state)
        checkpointer.finish()

    def load(comm: torchmn.Communicator) -> Any:
        checkpointer, state = parallel_layer(comm, tmp_path, is_plain, seed=7)
        try:
            assert checkpointer.resume(state) == 3
        except UsageError as error:
            return str(error)
        return float(state["model"].weight.detach().mean())

    on_ranks(save, 2)
    assert on_ranks(load, 2) == [0.0, 1.0]
    for text in on_ranks(load, 4):
        assert "saved by 2 ranks without a grid, and 'optimizer' has layers that are div" in text


# ---- parts of tensors are put together whatever their shapes ----


WHOLE = torch.arange(35.0).view(7, 5)


def part(rows: slice, columns: slice) -> dict[str, object]:
    return {
        PART: WHOLE[rows, columns].clone(),
        "shape": [7, 5],
        "offsets": [rows.start, columns.start],
    }


def put_together(parts: Sequence[dict[str, object]]) -> torch.Tensor:
    states = [{"model": {"w": each, "step": 3}} for each in parts]
    state = place_parts(states[0], nowhere, states, "model")
    assert state["model"]["step"] == 3
    result: torch.Tensor = state["model"]["w"]
    return result


@pytest.mark.parametrize(
    "parts",
    [
        [part(slice(0, 4), slice(0, 5)), part(slice(4, 7), slice(0, 5))],
        [part(slice(0, 7), slice(0, 3)), part(slice(0, 7), slice(3, 5))],
        [part(slice(0, 4), slice(0, 3)), part(slice(0, 4), slice(3, 5)),
         part(slice(4, 7), slice(0, 3)), part(slice(4, 7), slice(3, 5))],
        [part(slice(0, 4), slice(0, 5)), part(slice(0, 4), slice(0, 5)),
         part(slice(4, 7), slice(0, 5)), part(slice(4, 7), slice(0, 5))],
        [part(slice(0, 0), slice(0, 5)), part(slice(0, 7), slice(0, 5))],
    ],
    ids=["rows", "columns", "both", "replicas", "empty"],
)  # fmt: skip
def test_the_whole_is_what_its_parts_were(parts: Sequence[dict[str, object]]) -> None:
    assert torch.equal(put_together(parts), WHOLE)


def test_a_part_that_is_missing_is_noticed() -> None:
    twice = part(slice(0, 4), slice(0, 5))
    with pytest.raises(DataError, match=r"model\['model'\]\['w'\]: the parts"):
        put_together([twice, twice, part(slice(5, 7), slice(0, 5))])
