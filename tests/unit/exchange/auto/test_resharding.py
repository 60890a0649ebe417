"""What the optimizer's state holds for a resume, and what it becomes on other ranks."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.suites.resume_contracts import described
from tests.ranks import on_ranks
from tests.unit.exchange.auto.test_tuner import MAX_STEPS
from tests.unit.models import batch, equal, loss_of, mlp, optimizer_of, train, values, wrap
from torchmn.cluster import Topology
from torchmn.comm.codecs import ErrorFeedback, Quantized
from torchmn.errors import CheckpointWarning, UsageError
from torchmn.exchange.auto import tuner
from torchmn.exchange.options import Auto
from torchmn.exchange.resharding import mean_state, mean_tensor, reshard_codec
from torchmn.exchange.schedules import PeriodicAverage
from torchmn.testing import run_ranks


def test_means_keep_what_is_equal_and_take_counts_from_rank_0() -> None:
    states = [
        {
            0: {
                "step": torch.tensor(float(rank + 5)),
                "exp_avg": torch.tensor([1.0, rank]),
                "same": torch.tensor([0.1]),
                "count": rank,
                "flags": torch.tensor([rank, 7]),
            },
            **({1: {"exp_avg": torch.tensor([4.0])}} if rank else {}),
        }
        for rank in range(3)
    ]
    mean = mean_state(states)
    assert mean[0]["step"] == 5
    assert mean[0]["exp_avg"].tolist() == [1.0, 1.0]
    assert mean[0]["same"] == states[0][0]["same"]
    assert mean[0]["same"] is not states[0][0]["same"]
    assert mean[0]["count"] == 0
    assert mean[0]["flags"].tolist() == [0, 7]
    assert mean[1]["exp_avg"].tolist() == [4.0]
    weighted = mean_tensor([torch.tensor([1.0]), torch.tensor([float("nan")])], [1.0, 0.0])
    assert weighted.tolist() == [1.0]


@pytest.mark.parametrize(("nodes", "num_encoding"), [([4], 1), ([2, 1], 2), ([1, 1, 1], 3)])
def test_only_ranks_that_encode_have_residuals(nodes: list[int], num_encoding: int) -> None:
    entry = {"side": "worker", "name": "w", "offset": 0, "values": torch.tensor([6.0, -12.0])}
    old = {"rank": 0, "size": 1, "state": {"residuals": [entry], "codec": {}}}
    topology = Topology.blocks(nodes)
    states = run_ranks(
        lambda comm: reshard_codec([old], comm), topology.size, name="hierarchical",
        topology=topology,
    )  # fmt: skip
    shares = [s["state"]["residuals"][0]["values"] for s in states if s["state"]["residuals"]]
    assert len(shares) == num_encoding
    assert torch.stack(shares).sum(0).tolist() == [6.0, -12.0]
    assert [(s["rank"], s["size"]) for s in states] == [
        (r, topology.size) for r in range(topology.size)
    ]


def test_residuals_without_a_codec_are_dropped_with_a_warning() -> None:
    def rank_main(comm):
        codec = ErrorFeedback(Quantized(bits=1))
        model = torch.nn.Linear(40, 30)
        one = optimizer_of(comm, model, codec=codec)
        model(torch.ones(2, 40)).pow(2).mean().backward()
        one.step()
        state = described(one.state_dict())
        other = optimizer_of(comm, model)
        other.load_state_dict(state)

    with pytest.warns(CheckpointWarning, match="has residuals of a codec, which are dropped"):
        run_ranks(rank_main, 2)


@pytest.mark.parametrize("num_steps", [1, 4, 8, 11, 15])
def test_auto_measures_again_after_a_state_of_its_measurements(num_steps: int) -> None:
    """The plan that was in use, and what is pending in it, are left after one step."""

    def rank_main(comm):
        options = {"codec": Auto(lossy=True), "schedule": "auto"}
        model, optimizer = wrap(comm, **options)
        train(model, optimizer, comm.rank, range(num_steps))
        state = described(optimizer.state_dict())
        again, other = wrap(comm, **options)
        again.load_state_dict(described(model.state_dict()))
        other.load_state_dict(state)
        assert other.tuner._using == optimizer.tuner._using
        was_left = MAX_STEPS + tuner.NUM_WARM_UP + tuner.NUM_TIMED
        train(again, other, comm.rank, range(num_steps, num_steps + was_left))
        assert other.tuner.plan is not None
        return other.tuner.plan

    plans = run_ranks(rank_main, 2)
    assert plans[0] == plans[1]


def test_auto_measures_again_on_other_ranks_and_loses_nothing() -> None:
    """A mean that was pending under the old plan is applied before the plan is left."""

    def old(comm):
        model, optimizer = wrap(comm, schedule=Auto(stale=True), codec=Auto(lossy=True))
        late = next(p for p in optimizer.tuner.space.plans() if "double" in p.schedule)
        optimizer.tuner._decide(late, "for the test")
        train(model, optimizer, comm.rank, range(3))
        state = described((model.state_dict(), optimizer.state_dict()))
        optimizer.flush()
        return state, values(model)

    saved = run_ranks(old, 2)
    states = [optimizer_state for (_, optimizer_state), _ in saved]

    def new(comm):
        model, optimizer = wrap(comm, schedule=Auto(stale=True), codec=Auto(lossy=True))
        model.load_state_dict(saved[0][0][0])
        optimizer.load_state_dict(described(optimizer.reshard_state_dict(states, comm)))
        assert optimizer.tuner.plan is None
        assert "measures again" in " ".join(optimizer.resume_warnings())
        held = values(model)
        optimizer.flush()
        assert not equal(values(model), held)
        for mine, theirs in zip(values(model), saved[0][1], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-12)
        train(model, optimizer, comm.rank, range(1))
        assert optimizer.schedule.name == "every_step"

    run_ranks(new, 3)


# ---- what is refused, and resume warnings ----


@on_ranks(2)
def test_plain_states_and_those_of_other_schedules(comm) -> None:
    model, optimizer = wrap(comm, schedule="every_step")
    plain = torch.optim.SGD(mlp().parameters(), 0.3).state_dict()
    assert optimizer.reshard_state_dict([plain, plain, plain], comm) == plain
    _, late = wrap(comm, schedule="double_buffering")
    _, blocks = wrap(comm, schedule=PeriodicAverage(16))
    train(model, late, comm.rank, range(0))
    states = [described(blocks.state_dict())] * 3
    with pytest.raises(UsageError, match="saved with schedule 'periodic_average'"):
        optimizer.load_state_dict(optimizer.reshard_state_dict(states, comm))


@on_ranks(1)
def test_blocks_saved_at_different_exchanges_are_rejected(comm) -> None:
    """Rank 1 has larger batches and has begun an exchange that rank 0 had not."""
    _, optimizer = wrap(comm, schedule=PeriodicAverage(16, num_fragments=2))
    states = [described(optimizer.state_dict()) for _ in range(2)]
    states[1]["torchmn"]["order"]["next"] = 1
    with pytest.raises(UsageError, match="rank 0: next 0, .*rank 1: next 1.*or after optimi"):
        optimizer.reshard_state_dict(states, comm)


@on_ranks(1)
def test_resume_warnings(comm) -> None:
    _, plain = wrap(comm, schedule="every_step")
    assert plain.resume_warnings() == []
    _, lossy = wrap(comm, schedule=PeriodicAverage(16), codec="int8")
    first, second = lossy.resume_warnings()
    assert "mean of the old workers' parameters, weighted by samples" in first
    assert "int8" in second


@on_ranks(2)
def test_the_step_count_and_the_nonfinite_record_continue(comm) -> None:
    model, optimizer = wrap(comm, on_nonfinite="ignore")
    (loss_of(model, batch(comm.rank, 0)) * float("nan")).backward()
    optimizer.step()
    _, other = wrap(comm, on_nonfinite="ignore")
    other.load_state_dict(described(optimizer.state_dict()))
    assert other.nonfinite == optimizer.nonfinite
    assert other.nonfinite[0].by_rank.keys() == {0, 1}
    assert other.reducer.step == 1
