"""The gradient noise scale, where it is known and against gradients of one process."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from html import escape
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from tests.unit.models import OfObject, batch, equal, fill, local_grads, loss_of, mlp, values
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.errors import TorchmnWarning, UnsupportedError, UsageError
from torchmn.exchange.gradient_norms import GradientNorms, squared_norms
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.nn import MultiNodeChainList
from torchmn.observe.read.run_reader import read_run
from torchmn.observe.report.page import page
from torchmn.observe.report.summary import summarize
from torchmn.observe.report.text import as_json, show
from torchmn.record import record
from torchmn.testing import run_ranks
from torchmn.train.large_batch import GlobalBatch, GradientNoiseScale
from torchmn.train.large_batch.noise_scale import estimate

SIZE = 40
# The gradient of the whole data, and the standard deviation of each element for one sample.
MEAN = torch.linspace(-0.3, 0.5, SIZE, dtype=torch.float64)
DEVIATION = torch.linspace(0.1, 1.5, SIZE, dtype=torch.float64)
SQUARE, VARIANCE = float(MEAN.square().sum()), float(DEVIATION.square().sum())


def sample_gradients(num: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(num, SIZE, generator=generator, dtype=torch.float64)
    return MEAN + noise * DEVIATION


def norms_of(
    grads: Sequence[Tensor], weights: Sequence[float], samples: Sequence[int]
) -> GradientNorms:
    """What ranks with these gradients measure."""
    parts = [w / sum(weights) for w in weights]
    used = [each for each in zip(parts, grads, samples, strict=True) if each[0]]
    return GradientNorms(
        step=0,
        num_samples=sum(samples),
        own_square=sum(w * float(g.square().sum()) for w, g, _ in used),
        mean_square=float(sum(w * g for w, g, _ in used).square().sum()),
        own_noise=sum(w / b for w, _, b in used),
        mean_noise=sum(w * w / b for w, _, b in used),
    )


@pytest.mark.parametrize("by_samples", [True, False])
@pytest.mark.parametrize("samples", [[4, 4], [2, 2, 2, 2], [1, 9], [8, 1, 3]], ids=str)
def test_estimates_of_a_known_noise_are_unbiased(samples: list[int], by_samples: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3000):
        grads = [sample_gradients(b, generator).mean(0) for b in samples]
        weights = samples if by_samples else [1] * len(samples)
        found.append(estimate(norms_of(grads, weights, samples)))
    column = torch.tensor(found, dtype=torch.float64)
    error = column.std(0) / len(found) ** 0.5
    truth = torch.tensor([SQUARE, VARIANCE], dtype=torch.float64)
    assert bool(((column.mean(0) - truth).abs() < 4 * error).all())
    assert bool((error < 0.05 * truth).all())


def test_a_rank_with_all_the_weight_gives_no_estimate() -> None:
    grads = [torch.ones(3), torch.zeros(3)]
    assert estimate(norms_of(grads, [5, 0], [5, 0])) is None
    assert estimate(norms_of(grads, [5, 1e-9], [5, 7])) is None
    assert estimate(norms_of([grads[0] * math.inf, grads[1]], [1, 1], [1, 1])) is None


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    """The gradient of its mean output is the mean of its inputs."""
    return fill(nn.Linear(SIZE, 1, bias=False).to(dtype))


def optimizer_of(model: nn.Module, comm: Communicator, **options: Any) -> MultiNodeOptimizer:
    return create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), comm, model, **options
    )


SIZES = [[3, 5, 2], [0, 4, 1], [6, 0, 0], [2, 2, 7], [1, 1, 1]]  # samples of each rank in each step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": "samples"},
        {"weight": "samples", "schedule": "double_buffering"},
        {"gradient_as_bucket_view": True, "weight": "samples"},
        {"codec": "float16", "weight": "samples"},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_measure_what_one_process_computes(num_ranks: int, options: dict[str, Any]) -> None:
    """Also of uneven and empty batches, in several passes, before gradients are clipped."""
    sizes = [row[:num_ranks] for row in SIZES]
    is_weighted = options.get("weight") == "samples"
    if not is_weighted:  # where a rank without samples has no gradient
        sizes = [[max(1, size) for size in row] for row in sizes]

    def rank_main(comm: Communicator) -> tuple[dict[str, float], list[GradientNorms]]:
        model = mlp()
        optimizer = optimizer_of(model, comm, max_grad_norm=1e-3, **options)
        noise = GradientNoiseScale(optimizer, every=1)
        expected = []
        for step, row in enumerate(sizes):
            optimizer.zero_grad()
            parts = [batch(rank, step, size) for rank, size in enumerate(row)]
            alone = copy.deepcopy(model)  # whose forward counts no samples
            grads = [
                torch.cat([g.flatten() for g in local_grads(alone, part)])
                if len(part)
                else torch.zeros(1)
                for part in parts
            ]
            expected.append(norms_of(grads, row if is_weighted else [1] * len(row), row))
            own = parts[comm.rank]
            passes = [own[:1], own[1:]] if len(own) > 1 else [own]
            for number, each in enumerate(passes):
                with nullcontext() if number == len(passes) - 1 else optimizer.no_sync():
                    (loss_of(model, each) * (len(each) / max(1, len(own)))).backward()
            optimizer.step()
        optimizer.flush()
        return noise.state_dict(), expected

    results = run_ranks(rank_main, num_ranks)
    square = variance = 0.0
    estimates = [each for norms in results[0][1] if (each := estimate(norms)) is not None]
    for own_square, own_variance in estimates:
        square = 0.95 * square + 0.05 * own_square
        variance = 0.95 * variance + 0.05 * own_variance
    tolerance = 1e-2 if "codec" in options else 1e-9
    for state, _ in results:
        assert state == results[0][0]
        assert (
            state["num_measurements"]
            == len(estimates)
            == sum(r.count(0) < num_ranks - 1 for r in sizes)
        )
        assert state["square"] == pytest.approx(square, rel=tolerance)
        assert state["variance"] == pytest.approx(variance, rel=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight": "samples", "schedule": "double_buffering"}, {"codec": "float16"}],
    ids=str,
)
def test_training_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    def trained(is_measured: bool) -> list[Tensor]:
        def rank_main(comm: Communicator) -> list[Tensor]:
            model = mlp(dtype=torch.float32)
            optimizer = optimizer_of(model, comm, **options)
            if is_measured:
                GradientNoiseScale(optimizer, every=2)
            for step in range(6):
                optimizer.zero_grad()
                x = batch(comm.rank, step, 1 + (comm.rank + step) % 3, torch.float32)
                loss_of(model, x).backward()
                optimizer.step()
            optimizer.flush()
            return values(model)

        return run_ranks(rank_main, 3)[0]

    assert equal(trained(True), trained(False))


def test_a_scaled_loss_changes_nothing_and_steps_that_overflow_are_left_out() -> None:
    def rank_main(comm: Communicator, factors: Sequence[float]) -> dict[str, float]:
        model = linear(torch.float32)
        optimizer = optimizer_of(model, comm, on_nonfinite="ignore")
        noise = GradientNoiseScale(optimizer, every=1, decay=0.5)
        generator = torch.Generator().manual_seed(comm.rank)
        for factor in factors:
            optimizer.zero_grad()
            (model(sample_gradients(4, generator).float()).mean() * factor).backward()
        return {"value": noise.value(), **noise.state_dict()}

    plain = run_ranks(lambda comm: rank_main(comm, [1.0] * 4), 2)[0]
    scaled = run_ranks(lambda comm: rank_main(comm, [65536.0] * 4), 2)[0]
    assert scaled["value"] == pytest.approx(plain["value"], rel=1e-3)
    before = run_ranks(lambda comm: rank_main(comm, [1.0]), 2)[0]
    after = run_ranks(lambda comm: rank_main(comm, [1.0, math.inf, math.nan]), 2)[0]
    assert after == before
    one_rank = run_ranks(
        lambda comm: rank_main(comm, [1.0, math.inf if comm.rank == 1 else 1.0]), 2
    )
    assert one_rank == [before, before]


def test_gradients_that_are_not_of_one_backward_pass_are_left_out() -> None:
    def rank_main(comm: Communicator) -> list[int]:
        model = mlp()
        optimizer = optimizer_of(model, comm)
        noise = GradientNoiseScale(optimizer, every=1)
        counts = []
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            counts.append(noise.num_measurements)
        optimizer.zero_grad()
        optimizer.step()  # without a backward pass, where a rank weighs 1 all the same
        return [*counts, noise.num_measurements]

    assert run_ranks(rank_main, 2) == [[1, 1, 1]] * 2


def test_ranks_that_left_their_loop_measure_with_the_others() -> None:
    def rank_main(comm: Communicator) -> dict[str, float]:
        model = mlp()
        optimizer = optimizer_of(model, comm)
        noise = GradientNoiseScale(optimizer, every=1)
        with optimizer.join():
            for step in range(2 if comm.rank == 2 else 5):
                optimizer.zero_grad()
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
        return noise.state_dict()

    results = run_ranks(rank_main, 3)
    assert results[0]["num_measurements"] == 5
    assert results[1:] == results[:1] * 2


# ---- ordinary loops ----

"""Samples of each of two ranks in each step."""


def test_only_some_steps_are_measured_and_the_state_is_resumed() -> None:
    def rank_main(comm: Communicator) -> list[Any]:
        model = mlp()
        optimizer = optimizer_of(model, comm)
        noise = GradientNoiseScale(optimizer, every=4)
        assert noise.value() is None
        assert repr(noise) == "GradientNoiseScale(unknown, 0 measurements)"
        seen = []
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            seen.append(noise.num_measurements)
        other = GradientNoiseScale(optimizer_of(mlp(), comm))
        other.load_state_dict(noise.state_dict())
        return [seen, noise.value(), other.value()]

    seen, value, resumed = run_ranks(rank_main, 2)[0]
    assert seen == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert value == resumed


def test_a_mean_that_is_all_noise_has_no_limit() -> None:
    noise = GradientNoiseScale.__new__(GradientNoiseScale)
    noise.load_state_dict({"square": -0.1, "variance": 3.0, "num_measurements": 2})
    assert noise.value() == math.inf
    noise.load_state_dict({"square": 0.1, "variance": -3.0, "num_measurements": 2})
    assert noise.value() == 0


def test_squares_of_many_elements_are_exact_enough() -> None:
    many = torch.full((3_000_001,), 1.1)
    exact = len(many) * float(many[0].double().square())
    assert float(squared_norms(many).sum()) == pytest.approx(exact, rel=3e-5)
    narrow = torch.full((70_000,), 30000.0, dtype=torch.float16)
    assert float(squared_norms(narrow).sum()) == pytest.approx(
        70_000 * float(narrow[0]) ** 2, rel=1e-4
    )


# ---- refusals ----


def refuse(make: Callable[[Communicator], object], error: type[Exception], text: str) -> None:
    def rank_main(comm: Communicator) -> None:
        with pytest.raises(error, match=text):
            make(comm)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "block_momentum"}, "does not hold whole after each backward pass"),
        ({"schedule": "diloco"}, "Measure in a short run with schedule='every_step'"),
        ({"codec": "int8"}, "codec .*whose error would be taken for noise"),
        ({"reduction": "sum"}, "a sum grows with the batch"),
    ],
    ids=str,
)
def test_what_hides_the_gradients_is_refused(options: dict[str, Any], text: str) -> None:
    refuse(lambda comm: GradientNoiseScale(optimizer_of(mlp(), comm, **options)), UsageError, text)


def test_models_whose_gradients_are_not_whole_are_refused() -> None:
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))

    def of_sparse(comm: Communicator) -> None:
        GradientNoiseScale(
            create_multi_node_optimizer(torch.optim.SGD(sparse.parameters(), 0.1), comm, sparse)
        )

    refuse(of_sparse, UnsupportedError, "'0.weight' is sparse. Make its layer with sparse=False")

    def of_chain(comm: Communicator) -> None:
        chain = MultiNodeChainList(comm.split(comm.rank, 0))
        chain.add_link(nn.Linear(2, 2), rank_in=None, rank_out=None)
        GradientNoiseScale(optimizer_of(chain, comm))

    refuse(of_chain, UnsupportedError, "the modules of this chain are on several ranks")


def test_arguments_and_a_second_one_are_refused() -> None:
    refuse(lambda c: GradientNoiseScale(optimizer_of(mlp(), c), every=0), UsageError, "every=0")
    refuse(lambda c: GradientNoiseScale(optimizer_of(mlp(), c), decay=1), UsageError, "decay=1")

    def twice(comm: Communicator) -> None:
        optimizer = optimizer_of(mlp(), comm)
        GradientNoiseScale(optimizer)
        GradientNoiseScale(optimizer)

    refuse(twice, UsageError, "are measured already")


def test_samples_that_no_forward_shows_must_be_given() -> None:
    def rank_main(comm: Communicator) -> int:
        model = OfObject()
        optimizer = optimizer_of(model, comm)
        noise = GradientNoiseScale(optimizer, every=1)
        with pytest.raises(UsageError, match=r"Call optimizer.set_weight\(number_of_samples\)"):
            loss_of(model, SimpleNamespace(x=batch(comm.rank, 0))).backward()
        optimizer.zero_grad()
        optimizer.set_weight(4)
        loss_of(model, SimpleNamespace(x=batch(comm.rank, 0))).backward()
        return noise.num_measurements

    assert run_ranks(rank_main, 2) == [1, 1]


def test_one_rank_alone_is_warned_and_measures_nothing() -> None:
    def rank_main(comm: Communicator) -> float | None:
        model = mlp()
        optimizer = optimizer_of(model, comm)
        with pytest.warns(TorchmnWarning, match="not measured on one rank alone"):
            noise = GradientNoiseScale(optimizer, every=1)
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        return noise.value()

    assert run_ranks(rank_main, 1) == [None]


# ---- the report ----


def test_the_report_has_the_batch_and_what_will_not_pay(tmp_path: Path) -> None:
    def rank_main(comm: Communicator) -> float | None:
        alone = comm.split(comm.rank, 0)
        with record(alone, tmp_path) if comm.rank == 0 else nullcontext():
            comm.barrier()
            return train(comm)

    def train(comm: Communicator) -> float | None:
        model = linear()
        optimizer = optimizer_of(model, comm)
        global_batch = GlobalBatch(64, accumulation=2, comm=comm)
        noise = GradientNoiseScale(optimizer, every=2)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(20):
            optimizer.zero_grad()
            samples = sample_gradients(global_batch.share, generator)
            for part, share in global_batch.micro_batches(samples, optimizer):
                (model(part).mean() * share).backward()
            optimizer.step()
        return noise.value()

    value = run_ranks(rank_main, 2)[0]
    summary = summarize(read_run(tmp_path))
    assert value is not None
    assert summary.noise_scale == pytest.approx(value)
    settings = summary.ranks[0].settings
    names = ("global_batch", "local_batch", "accumulation", "workers")
    assert [settings[name] for name in names] == ["64", "16", "2", "2"]
    assert summary.batch_advice == (
        f"A batch above {value:,.0f} samples will not pay: that is the gradient noise scale at the "
        "end of the record, and the global batch is 64 (McCandlish et al. 2018, arXiv 1812.06162)."
    )
    assert escape(summary.batch_advice) in page([(summary, [])], None, None)
    show(Console(file=(text := StringIO()), width=1000), [(summary, [])], None, None)
    assert summary.batch_advice in text.getvalue()
    as_read = as_json([(summary, [])], None, None)["runs"][0]
    assert as_read["gradient_noise_scale"] == summary.noise_scale
