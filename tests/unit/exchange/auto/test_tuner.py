"""Schedule and codec selected by measurement."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, loss_of, train, values, wrap
from torchmn.cluster import Topology
from torchmn.comm.codecs import Float16
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.auto import tuner
from torchmn.exchange.auto.predict import Plan
from torchmn.exchange.options import Auto
from torchmn.exchange.schedules import DoubleBuffering, EveryStep
from torchmn.record.timeline import GpuClock
from torchmn.testing import run_ranks

MAX_TURNS = 2 * tuner.MAX_TRIALS + 1
MAX_TURN_STEPS = 1 + DoubleBuffering().traits.staleness_steps + tuner.NUM_TIMED
MAX_STEPS = tuner.NUM_WARM_UP + tuner.NUM_TIMED + MAX_TURNS * MAX_TURN_STEPS
ALLOWED = {
    "stale": "double_buffering",
    "lossy": "every_step",
}


@pytest.mark.parametrize(("name", "nodes"), [("flat", [2]), ("hierarchical", [2, 1])])
@pytest.mark.parametrize("allowed", [(), ("lossy",), ("stale",), tuple(ALLOWED)])
def test_all_ranks_select_the_same_plan_and_report_why(name, nodes, allowed, caplog) -> None:
    caplog.set_level("INFO", "torchmn")
    topology = Topology.blocks(nodes)
    auto = Auto(**dict.fromkeys(allowed, True))

    def rank_main(comm):
        model, optimizer = wrap(comm, codec=auto, schedule=auto)
        assert optimizer.tuner.plan is None
        train(model, optimizer, comm.rank, range(MAX_STEPS))
        optimizer.flush()
        chosen = optimizer.tuner
        assert chosen.plan is not None
        best = min(chosen.trials, key=lambda trial: trial.step_s)
        assert chosen.plan in (best.plan, chosen.trials[0].plan)
        turns = Counter(trial.plan for trial in chosen.trials)
        assert set(turns.values()) <= ({2} if len(turns) > 1 else {1})
        tried = {trial.plan.codec for trial in chosen.trials}
        assert "lossy" in allowed or tried == {"float32"}
        schedules = {trial.plan.schedule for trial in chosen.trials}
        assert schedules <= {"every_step", *(ALLOWED[kind] for kind in allowed if kind in ALLOWED)}
        assert optimizer.reducer.exchange.bucket_bytes == chosen.plan.bucket_bytes
        return chosen.plan, chosen.reason, values(model)

    results = run_ranks(rank_main, topology.size, name=name, topology=topology)
    for plan, reason, held in results:
        assert plan == results[0][0]
        assert len(reason.splitlines()) == 3
        assert equal(held, results[0][2])
    assert caplog.text.count("auto selected") == 1


@on_ranks(2)
def test_schedules_that_cannot_work_in_the_script_are_excluded(comm):
    """A GradScaler, and two backward passes for a step: no trial of what cannot work with them."""
    auto = Auto(lossy=True, stale=True)
    model, optimizer = wrap(comm, schedule=auto, codec=auto)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More than one backward pass")
        for step in range(MAX_STEPS + 2):
            optimizer.zero_grad()
            for part in range(2):
                scaler.scale(loss_of(model, batch(comm.rank, step + 50 * part))).backward()
            scaler.step(optimizer)
            scaler.update()
    tried = {trial.plan.schedule for trial in optimizer.tuner.trials}
    assert tried == {"every_step"}
    assert "without double_buffering: " in optimizer.tuner.reason
    return values(model)


@on_ranks(2)
def test_a_saved_plan_that_is_no_longer_allowed(comm) -> None:
    model, optimizer = wrap(comm, schedule=Auto(stale=True))
    optimizer.tuner._start_over()
    optimizer.tuner._decide(
        Plan(schedule="double_buffering", codec="float32", bucket_bytes=1 << 20), "for the test"
    )
    train(model, optimizer, comm.rank, range(2))
    pending = optimizer.state_dict()
    optimizer.flush()
    flushed = copy.deepcopy(optimizer.state_dict())
    _, again = wrap(comm, schedule="auto")
    with pytest.raises(UsageError, match=r"saved with schedule 'double_buffering'"):
        again.load_state_dict(pending)
    again.load_state_dict(flushed)
    assert again.tuner.plan is None


@on_ranks(2)
def test_a_codec_alone_may_be_chosen(comm) -> None:
    model, optimizer = wrap(comm, codec=Auto(lossy=True))
    train(model, optimizer, comm.rank, range(MAX_STEPS))
    assert {trial.plan.schedule for trial in optimizer.tuner.trials} == {"every_step"}


@on_ranks(2)
def test_a_codec_that_cannot_be_timed_is_tried_all_the_same(comm) -> None:
    model, optimizer = wrap(comm, schedule=Auto(stale=True), codec="power_sgd")
    train(model, optimizer, comm.rank, range(MAX_STEPS))
    tried = {trial.plan.schedule for trial in optimizer.tuner.trials}
    assert tried == {"every_step", "double_buffering"}
    assert optimizer.tuner.plan is not None


@on_ranks(2, name="single_node")
def test_shared_memory_leaves_nothing_to_choose(comm) -> None:
    model, optimizer = wrap(comm, codec=Auto(lossy=True), schedule="auto")
    train(model, optimizer, comm.rank, range(tuner.NUM_WARM_UP + tuner.NUM_TIMED))
    assert optimizer.tuner.plan.codec == "float32"
    assert "nothing crosses a network" in optimizer.tuner.reason


@pytest.mark.parametrize(
    ("default_s", "other_s", "is_selected"),
    [
        ([1.00, 1.10], [0.90, 0.97], True),
        ([1.00, 1.10], [0.50, 0.99], False),  # no 2 % faster in its second turn
        ([1.00, 0.80], [0.85, 0.86], False),  # the default has been faster
    ],
)
@on_ranks(1)
def test_a_plan_is_selected_if_it_is_faster_in_both_turns(
    comm, default_s: list[float], other_s: list[float], is_selected: bool
) -> None:
    _, optimizer = wrap(comm, codec=Auto(lossy=True))
    chosen = optimizer.tuner
    default, other = (
        Plan(schedule="every_step", codec=codec, bucket_bytes=1 << 20)
        for codec in ("float32", "int8")
    )
    chosen._default = default
    chosen.trials = [
        tuner.Trial(plan, step_s)
        for pair in zip(default_s, other_s, strict=True)
        for plan, step_s in zip((default, other), pair, strict=True)
    ]
    chosen._try_next()
    assert chosen.plan == (other if is_selected else default)
    assert ("the first is kept" in chosen.reason) != is_selected
    assert f"{1e3 * min(other_s):.1f} ms" in chosen.reason


class Stream(GpuClock):
    """A stand-in for a GPU: the host marks moments at once, and their times are known later."""

    def __init__(self) -> None:
        self.at_s, self.num_asked = 0.0, 0

    def mark(self) -> float:
        return self.at_s

    def is_over(self, mark: float) -> bool:
        self.num_asked += 1
        return self.num_asked > 3

    def seconds(self, begin: float, end: float) -> float:
        assert self.num_asked > 3, "asked for a time before the GPU had passed it"
        return end - begin


def test_times_are_those_of_the_device_without_the_wait_for_the_exchange() -> None:
    clock, first, last = Stream(), torch.zeros(2, 3), torch.zeros(3)
    num_raised = []
    timer = tuner.StepTimer(clock, lambda: num_raised.append(None))
    for wait_s in (5.0, 2.0, 3.0):
        clock.at_s += 10.0  # forward
        for parameter, after_s in ((last, 0.0), (first, 4.0)):
            clock.at_s += after_s
            timer._record(parameter)
        clock.at_s += 1.0
        with timer.waiting():
            clock.at_s += wait_s
        clock.at_s += 0.5
        timer.step_ended()
    assert timer.num_steps == 3
    facts = timer.facts(3)
    assert len(num_raised) == 3  # while it has waited for the GPU
    assert facts.compute_s == pytest.approx(15.5)
    assert facts.backward_s == pytest.approx(5.0)
    assert [(gradient.numel, gradient.ready_s) for gradient in facts.gradients] == [
        (3, 0.0),
        (6, pytest.approx(4.0)),
    ]
    timer.restart()
    assert timer.num_steps == 0


@on_ranks(2)
def test_a_saved_plan_is_used_again_bit_equal(comm) -> None:
    options = {"codec": Auto(lossy=True), "schedule": "auto"}
    model, optimizer = wrap(comm, **options)
    train(model, optimizer, comm.rank, range(MAX_STEPS))
    saved = copy.deepcopy(optimizer.state_dict())
    again, other = wrap(comm, **options)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    assert other.tuner.plan == optimizer.tuner.plan
    for each, network in ((optimizer, model), (other, again)):
        train(network, each, comm.rank, range(3))
        each.flush()
    assert equal(values(model), values(again))


@on_ranks(3)
def test_ranks_whose_data_end_early_decide_too(comm):
    model, optimizer = wrap(comm, codec=Auto(lossy=True), schedule="auto")
    with optimizer.join():
        train(model, optimizer, comm.rank, range(4 + comm.rank * MAX_STEPS))
    assert optimizer.tuner.plan is not None
    return values(model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "auto", "schedule": EveryStep()}, "chooses among names"),
        ({"codec": Float16(), "schedule": "auto"}, "chooses among names"),
    ],
)
def test_what_is_rejected(options: dict, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        run_ranks(lambda comm: wrap(comm, **options), 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": Auto(stale=True)}, r"Auto\(stale=True\) is about the schedule"),
        ({"schedule": Auto(lossy=True)}, r"Auto\(lossy=True\) is about the codec"),
    ],
)
def test_what_is_allowed_must_be_chosen(options: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run_ranks(lambda comm: wrap(comm, **options), 1)
