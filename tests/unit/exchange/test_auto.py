"""The schedule that chooses by measurement."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from torchmn import create_multi_node_optimizer
from torchmn.compression import Float16
from torchmn.errors import UnknownNameError, UnsupportedError
from torchmn.exchange import EveryStep, auto
from torchmn.testing import run_ranks
from torchmn.topology import Topology

from .models import batch, equal, loss_of, mlp, values

MOST_TURNS = 2 * auto.MOST_TRIALS + 1
MOST_STEPS = auto.NUM_WARM_UP + auto.NUM_TIMED + MOST_TURNS * (auto.NUM_TIMED + 2)


def train(optimizer, model, comm, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()


def wrap(comm, **options):
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, create_multi_node_optimizer(inner, comm, model, **options)


@pytest.mark.parametrize(("name", "nodes"), [("flat", [2]), ("hierarchical", [2, 1])])
@pytest.mark.parametrize("allow_lossy", [False, True])
def test_all_ranks_decide_alike_and_say_why(name, nodes, allow_lossy, capfd) -> None:
    topology = Topology.blocks(nodes)

    def rank_main(comm):
        model, optimizer = wrap(comm, codec="auto", schedule="auto", allow_lossy=allow_lossy)
        assert optimizer.schedule.plan is None
        train(optimizer, model, comm, range(MOST_STEPS))
        optimizer.flush()
        chosen = optimizer.schedule
        assert chosen.plan is not None
        best = min(chosen.trials, key=lambda trial: trial.step_s)
        assert chosen.plan in (best.plan, chosen.trials[0].plan)
        turns = Counter(trial.plan for trial in chosen.trials)
        assert set(turns.values()) <= ({2} if len(turns) > 1 else {1})
        tried = {trial.plan.codec for trial in chosen.trials}
        late = {trial.plan.schedule for trial in chosen.trials} & {"double_buffering"}
        assert allow_lossy or (tried == {"float32"} and not late)
        assert comm.bucket_bytes == chosen.plan.bucket_bytes
        return chosen.plan, chosen.reason, values(model)

    results = run_ranks(rank_main, topology.size, name=name, topology=topology)
    for plan, reason, held in results:
        assert plan == results[0][0]
        assert len(reason.splitlines()) == 3
        assert equal(held, results[0][2])
    assert capfd.readouterr().err.count("torchmn: auto takes") == 1


def test_a_codec_alone_may_be_chosen() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, codec="auto", allow_lossy=True)
        train(optimizer, model, comm, range(MOST_STEPS))
        assert {trial.plan.schedule for trial in optimizer.schedule.trials} == {"every_step"}

    run_ranks(rank_main, 2)


def test_shared_memory_leaves_nothing_to_choose() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, codec="auto", schedule="auto", allow_lossy=True)
        train(optimizer, model, comm, range(auto.NUM_WARM_UP + auto.NUM_TIMED))
        assert optimizer.schedule.plan.codec == "float32"
        assert "nothing crosses a network" in optimizer.schedule.reason

    run_ranks(rank_main, 2, name="single_node")


def test_a_saved_plan_is_used_again_and_goes_on_bit_equal() -> None:
    def rank_main(comm):
        options = {"codec": "auto", "schedule": "auto", "allow_lossy": True}
        model, optimizer = wrap(comm, **options)
        train(optimizer, model, comm, range(MOST_STEPS))
        saved = copy.deepcopy(optimizer.state_dict())
        again, other = wrap(comm, **options)
        again.load_state_dict(model.state_dict())
        other.load_state_dict(saved)
        assert other.schedule.plan == optimizer.schedule.plan
        for each, network in ((optimizer, model), (other, again)):
            train(each, network, comm, range(3))
            each.flush()
        assert equal(values(model), values(again))

    run_ranks(rank_main, 2)


def test_ranks_whose_data_end_early_decide_too() -> None:
    def rank_main(comm):
        model, optimizer = wrap(comm, codec="auto", schedule="auto", allow_lossy=True)
        with optimizer.join():
            train(optimizer, model, comm, range(4 + comm.rank * MOST_STEPS))
        assert optimizer.schedule.plan is not None
        return values(model)

    results = run_ranks(rank_main, 3)
    assert all(equal(result, results[0]) for result in results)


def test_drift_leads_to_a_new_plan(monkeypatch) -> None:
    monkeypatch.setattr(auto, "REPLAN_STEPS", 5)
    monkeypatch.setattr(auto, "DRIFT", 1e3)

    def rank_main(comm):
        model, optimizer = wrap(comm, codec="auto", replan=True)
        train(optimizer, model, comm, range(MOST_STEPS))
        assert optimizer.schedule.plan is not None
        optimizer.schedule._planned_s = 1e-9  # as if the network had been so much faster
        train(optimizer, model, comm, range(5))
        assert optimizer.schedule.plan is None

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "auto", "schedule": EveryStep()}, "chooses among names"),
        ({"codec": Float16(), "schedule": "auto"}, "chooses among names"),
    ],
)
def test_what_is_refused(options: dict, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        run_ranks(lambda comm: wrap(comm, **options), 1)


def test_auto_is_among_the_known_names() -> None:
    with pytest.raises(UnknownNameError, match="Known: auto, every_step"):
        run_ranks(lambda comm: wrap(comm, schedule="sometimes"), 1)
