"""The multi-node evaluator gives the result of one process on the whole set, for any shards."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_pfn_extras as ppe
import torch
from pytorch_pfn_extras.training.extensions import Evaluator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.testing import run_ranks
from torchmn.train.evaluation import Ratio, create_multi_node_evaluator


class Scores(nn.Module):
    """Reports a mean over samples and, as a Ratio, a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def forward(self, values: Tensor, lengths: Tensor) -> None:
        loss = (self.scale * values + self.shift).square().mean()
        num_right = (torch.arange(5) * values[:, None] > 0.2)[
            torch.arange(5) < lengths[:, None]
        ].sum()
        ppe.reporting.report(
            {"loss": loss, "accuracy": Ratio(num_right, lengths.sum()), "plain": 2.0}, self
        )


def samples(n: int) -> TensorDataset:
    random = np.random.RandomState(n)
    return TensorDataset(
        torch.from_numpy(random.randn(n)), torch.from_numpy(random.randint(0, 6, n))
    )


def cut(n: int, size: int, seed: int) -> list[list[int]]:
    """Shards of any sizes, most of them uneven, some empty; together every sample once."""
    random = np.random.RandomState(seed)
    owner = random.randint(0, size, n) if seed % 3 else np.full(n, seed % size)
    return [[int(i) for i in np.flatnonzero(owner == rank)] for rank in range(size)]


def plain_evaluator(dataset: Any, batch_size: int = 3, **options: Any) -> Evaluator:
    model = options.pop("model", None) or Scores()
    evaluator = Evaluator(DataLoader(dataset, batch_size=batch_size, **options), model)
    evaluator.name = "validation"
    return evaluator


def exact(dataset: TensorDataset) -> dict[str, float]:
    """What one process gives on the whole set as one batch."""
    evaluator = plain_evaluator(dataset, batch_size=max(1, len(dataset)))
    return {name: float(value) for name, value in evaluator().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_uneven_and_empty_shards_give_the_result_of_the_whole_set(size: int) -> None:
    cases = [(n, batch_size) for n in (0, 1, 2, 5, 12, 20) for batch_size in (1, 7)]

    def body(comm: Communicator) -> list[dict[str, float]]:
        results = []
        for n, batch_size in cases:
            shard = Subset(samples(n), cut(n, comm.size, seed=n + batch_size)[comm.rank])
            evaluator = create_multi_node_evaluator(plain_evaluator(shard, batch_size), comm)
            results.append(evaluator())
        return results  # type: ignore[return-value]

    for per_rank in run_ranks(body, size):
        for (n, _), result in zip(cases, per_rank, strict=True):
            if n == 0:
                assert result == {}
                continue
            expected = exact(samples(n))
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                if name.endswith("accuracy") and int(samples(n).tensors[1].sum()) == 0:
                    continue
                assert math.isclose(result[name], value, rel_tol=1e-13), (n, name)


def test_all_ranks_get_the_same_bits_and_report_them() -> None:
    def body(comm: Communicator) -> tuple[dict[str, float], dict[str, float]]:
        shard = Subset(samples(17), cut(17, comm.size, seed=1)[comm.rank])
        evaluator = create_multi_node_evaluator(plain_evaluator(shard), comm)
        reporter, observation = ppe.reporting.Reporter(), {}
        with reporter.scope(observation):
            result = evaluator()
        return result, observation  # type: ignore[return-value]

    results = run_ranks(body, 3)
    assert all(result == results[0] for result in results)
    assert results[0][0] == results[0][1]
    assert set(results[0][0]) == {
        "validation/main/loss",
        "validation/main/accuracy",
        "validation/main/plain",
    }


class Accuracy(nn.Module):
    """The fraction of ones."""

    def forward(self, hits: Tensor) -> None:
        ppe.reporting.report({"accuracy": hits.mean()}, self)


class TestChainerMN:
    """ancestors 4.6: 500 test images in batches of 32 are 15 x 32 + 20."""

    HITS = torch.from_numpy((np.random.RandomState(0).rand(500) < 0.3).astype(np.float64))

    def _run(self, size: int, **options: Any) -> float:
        def body(comm: Communicator) -> float:
            hits = TensorDataset(self.HITS.chunk(comm.size)[comm.rank])
            evaluator = plain_evaluator(hits, 32, model=Accuracy())
            result = create_multi_node_evaluator(evaluator, comm, **options)()
            return result["validation/main/accuracy"]  # type: ignore[index, return-value]

        values = run_ranks(body, size)
        assert len(set(values)) == 1
        return values[0]

    def test_one_process_takes_the_mean_of_batch_means(self) -> None:
        batches = self.HITS.split(32)
        assert [len(batch) for batch in batches] == [32] * 15 + [20]
        expected = sum(float(batch.mean()) for batch in batches) / 16
        assert self._run(1, compat="chainermn") == pytest.approx(expected, rel=1e-13)

    def test_four_processes_take_the_mean_of_rank_means(self) -> None:
        shards = self.HITS.chunk(4)
        assert [len(batch) for batch in shards[0].split(32)] == [32, 32, 32, 29]
        expected = sum(
            sum(float(batch.mean()) for batch in shard.split(32)) / 4 for shard in shards
        )
        assert self._run(4, compat="chainermn") == pytest.approx(expected / 4, rel=1e-13)
        assert self._run(4, compat="chainermn") != pytest.approx(self._run(4), rel=1e-6)

    def test_a_rank_without_samples_does_not_block(self) -> None:
        def body(comm: Communicator) -> Any:
            hits = TensorDataset(self.HITS[: 0 if comm.rank else 40])
            evaluator = plain_evaluator(hits, 32, model=Accuracy())
            return create_multi_node_evaluator(evaluator, comm, compat="chainermn")()

        first, second = run_ranks(body, 2)
        assert first == second
        assert list(first) == ["validation/main/accuracy"]


@pytest.mark.parametrize(
    ("rule", "seen"), [("average", [2.0, 2.0]), ("rank0", [1.0, 1.0]), ("local", [1.0, 3.0])]
)
def test_buffers_that_are_evaluated(rule: Any, seen: list[float]) -> None:
    def body(comm: Communicator) -> tuple[float, float]:
        model = Scores()
        model.shift.fill_(1.0 + 2 * comm.rank)
        evaluator = plain_evaluator(samples(4), model=model)
        result = create_multi_node_evaluator(evaluator, comm, buffers=rule)()
        return float(model.shift), result["validation/main/loss"]  # type: ignore[index, return-value]

    def loss_with(shift: float) -> float:
        return float((1.5 * samples(4).tensors[0] + shift).square().mean())

    shifts, losses = zip(*run_ranks(body, 2), strict=True)
    assert list(shifts) == seen
    assert losses[0] == losses[1]
    expected = sum(loss_with(shift) for shift in seen) / 2
    assert losses[0] == pytest.approx(expected, rel=1e-12)


class FailsOn(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, values: Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError("no such token")
        ppe.reporting.report({"loss": values.mean()}, self)


def test_a_rank_that_raises_ends_the_evaluation_of_all_at_once() -> None:
    begin_s = time.monotonic()

    def body(comm: Communicator) -> Exception | None:
        model = FailsOn(comm.rank == 1)
        evaluator = plain_evaluator(TensorDataset(torch.ones(4)), model=model)
        create_multi_node_evaluator(evaluator, comm)
        try:
            evaluator()
        except Exception as error:
            comm.barrier()  # the communicator is still good
            return error
        return None

    first, second, third = run_ranks(body, 3, timeout_s=limit(30))
    assert time.monotonic() - begin_s < limit(15)
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, CommunicationError)
        assert "rank 1 raised ZeroDivisionError: no such token" in str(other)


def test_a_shard_may_take_longer_than_the_time_limit() -> None:
    timeout_s = limit(0.8)

    class Slow(nn.Module):
        def forward(self, values: Tensor) -> None:
            time.sleep(timeout_s / 8)
            ppe.reporting.report({"loss": values.mean()}, self)

    def body(comm: Communicator) -> Any:
        values = torch.arange(12.0)[: 12 if comm.rank == 0 else 0]
        evaluator = plain_evaluator(TensorDataset(values), 1, model=Slow())
        return create_multi_node_evaluator(evaluator, comm)()

    first, second = run_ranks(body, 2, timeout_s=timeout_s)
    assert first == second == {"validation/main/loss": 5.5}


class OwnLoop(Evaluator):
    """Written as in the documentation of pytorch-pfn-extras; adds values of its own."""

    def evaluate(self) -> dict[str, Any]:
        summary = ppe.reporting.DictSummary()
        for batch in self.get_iterator("main"):
            observation: dict[str, Any] = {}
            with ppe.reporting.report_scope(observation):
                self.get_target("main")(*batch)
            summary.add(observation)
        result = summary.compute_mean()
        num_samples = len(self.get_iterator("main").dataset)  # type: ignore[arg-type]
        return {**result, "own": float(num_samples), "ratio": Ratio(num_samples, 2)}


def test_a_subclass_with_its_own_loop() -> None:
    sizes = [2, 9]

    def body(comm: Communicator) -> Any:
        shard = Subset(samples(11), [[0, 1], list(range(2, 11))][comm.rank])
        evaluator = OwnLoop(DataLoader(shard, batch_size=4), Scores())
        evaluator.name = "validation"
        assert create_multi_node_evaluator(evaluator, comm) is evaluator
        return evaluator()

    expected = exact(samples(11))
    for result in run_ranks(body, 2):
        assert result["validation/main/loss"] == pytest.approx(expected["validation/main/loss"])
        assert result["own"] == pytest.approx(sum(n * n for n in sizes) / 11)
        assert result["ratio"] == pytest.approx(11 / 4)


class Reports(nn.Module):
    """Reports the same value for each batch."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *batch: Any) -> None:
        ppe.reporting.report({"value": self.value}, self)


def evaluated(comm: Communicator, value: Any, dataset: Any = None, **options: Any) -> None:
    data = TensorDataset(torch.ones(4)) if dataset is None else dataset
    evaluator = plain_evaluator(data, model=Reports(value), **options)
    create_multi_node_evaluator(evaluator, comm)()


def made(comm: Communicator, **options: Any) -> Evaluator:
    return create_multi_node_evaluator(plain_evaluator(samples(3)), comm, **options)


VALUE = "validation/main/value"
REFUSED: dict[str, tuple[Callable[[Communicator], object], type[Exception], tuple[str, ...]]] = {
    "no evaluator": (
        lambda comm: create_multi_node_evaluator(Scores(), comm),  # type: ignore[type-var]
        UsageError,
        ("Scores",),
    ),
    "twice": (
        lambda comm: create_multi_node_evaluator(made(comm), comm),
        UsageError,
        ("already",),
    ),
    "ranks that disagree": (
        lambda comm: made(comm, buffers="average" if comm.rank else "local"),
        RankMismatchError,
        (),
    ),
    "a matrix": (
        lambda comm: evaluated(comm, torch.ones(2, 3)),
        UsageError,
        (VALUE, "of shape [2, 3]"),
    ),
    "a text": (lambda comm: evaluated(comm, "high"), UsageError, (VALUE, "str 'high'")),
    "an array": (lambda comm: evaluated(comm, np.ones(2)), UsageError, (VALUE, "[2]")),
    "batches without a tensor": (
        lambda comm: evaluated(comm, 1.0, [1.0, 2.0], collate_fn=tuple),
        UsageError,
        ("Ratio(sum, count)",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(name: str) -> None:
    make, kind, texts = REFUSED[name]

    def body(comm: Communicator) -> str:
        with pytest.raises(kind) as caught:
            make(comm)
        return str(caught.value)

    for found in run_ranks(body, 2):
        assert all(text in found for text in texts)


def test_the_model_is_in_evaluation_mode_and_back_afterwards() -> None:
    seen: list[bool] = []

    class Model(nn.Module):
        def forward(self, values: Tensor) -> None:
            seen.append(self.training or torch.is_grad_enabled())
            ppe.reporting.report({"loss": values.mean()}, self)

    def body(comm: Communicator) -> bool:
        model = Model()
        create_multi_node_evaluator(
            plain_evaluator(TensorDataset(torch.ones(4)), model=model), comm
        )()
        return model.training

    assert run_ranks(body, 2) == [True, True]
    assert seen
    assert not any(seen)
