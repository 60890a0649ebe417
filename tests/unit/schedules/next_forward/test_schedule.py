"""The exchange that overlaps the next forward: the same steps, and what waits for what."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contracts.suites.communicator_contracts import seeded
from tests.unit.models import equal, fill, grads
from torchmn import create_multi_node_optimizer
from torchmn.errors import NonFiniteGradientError, UnsupportedError, UsageError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.schedules import EveryStep, EveryStepNextForward
from torchmn.schedules.next_forward.pending_gradient import GradientUnderWay
from torchmn.testing import run_ranks
from torchmn.topology import Topology
from torchmn.units import KiB

CHUNK_BYTES = 8 * KiB
NUM_STEPS = 8


def network() -> nn.Sequential:
    return fill(
        nn.Sequential(
            nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 60), nn.Tanh(),
            nn.Linear(60, 3),
        ).double()
    )  # fmt: skip


def batch(comm, step, size=4):
    return seeded(comm.rank, size, 5, salt=100 + step) / 10


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-2)


def wrap(comm, schedule, model, inner=None, **options):
    optimizer = create_multi_node_optimizer(
        inner or sgd(model), comm, model, schedule=schedule, **options
    )
    if isinstance(schedule, EveryStep):
        optimizer.reducer.set_chunk_size(CHUNK_BYTES)
    return optimizer


def state_of(model):
    return [value.clone() for value in model.state_dict().values()]


def deferred(comm, schedule):
    """Whether it is past measuring."""
    return isinstance(schedule, EveryStep) or comm.size == 1 or schedule.plan is not None


def both(train, world_size=2, name="hierarchical"):
    """``train(comm, schedule)`` gives the same bits with both schedules, and on all ranks.

    Returns the warnings of the later one, each once.
    """

    def run(make):
        return run_ranks(lambda comm: train(comm, make()), world_size, name=name)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        later = run(lambda: EveryStepNextForward(chunk_bytes=CHUNK_BYTES))
        texts = {str(warning.message) for warning in caught}
        plain = run(EveryStep)
    for rank in range(world_size):
        assert equal(later[rank], plain[rank])
    return texts


INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "tensor lr": lambda ps: torch.optim.Adam(ps, torch.tensor(0.01), foreach=False),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5, centered=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", INNER)
def test_the_bits_are_those_of_every_step(kind: str, world_size: int) -> None:
    """With groups, a learning rate scheduler, and options that change after step()."""

    def train(comm, schedule):
        model = network()
        groups = [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[3].parameters()], "lr": 0.02},
            {"params": model[5].parameters(), "weight_decay": 0.1},
        ]
        inner = INNER[kind](groups)
        if kind == "tensor lr":
            inner.param_groups[1]["lr"] = torch.tensor(0.02)
        optimizer = wrap(comm, schedule, model, inner)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
        assert deferred(comm, schedule)
        inner_state = optimizer.state_dict()["state"]
        return state_of(model) + [
            v.clone() for s in inner_state.values() for v in s.values() if torch.is_tensor(v)
        ]

    both(train, world_size)


@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "1bit", "power_sgd"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_a_codec_are_those_of_every_step_with_the_same_cuts(
    codec: str, world_size: int
) -> None:
    def train(comm, make):
        model = network()
        optimizer = wrap(comm, make(), model, codec=codec)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        return state_of(model)

    def run(make):  # on hosts of their own, or nothing would be encoded
        topology = Topology.blocks([1] * world_size)
        return run_ranks(
            lambda comm: train(comm, make), world_size, name="hierarchical", topology=topology
        )

    later, plain = run(lambda: EveryStepNextForward(chunk_bytes=CHUNK_BYTES)), run(EveryStep)
    for rank in range(world_size):
        assert equal(later[rank], plain[rank])


@pytest.mark.parametrize("options", [{"weight": "samples"}, {"zero_fill": False}])
def test_weights_and_parameters_that_are_not_used(options) -> None:
    def train(comm, schedule):
        model = nn.ModuleDict({"used": network(), "rare": network()})
        optimizer = wrap(comm, schedule, model, **options)
        for step in range(NUM_STEPS):
            if "weight" in options:
                optimizer.set_weight(1.0 + comm.rank + step)
            optimizer.zero_grad()
            loss = model["used"](batch(comm, step, 3 + comm.rank)).pow(2).mean()
            if step % 3 == 0 and comm.rank == 1:
                loss = loss + model["rare"](batch(comm, step)).pow(2).mean()
            loss.backward()
            optimizer.step()
        return state_of(model["used"]) + [p.detach().clone() for p in model["rare"].parameters()]

    both(train)


@pytest.mark.parametrize("how", ["optimizer", "model", "in place", "late", "never"])
def test_whenever_gradients_are_cleared(how: str) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        seen = []
        for step in range(NUM_STEPS):
            if how in ("optimizer", "in place"):
                optimizer.zero_grad(set_to_none=how == "optimizer")
            elif how == "model":
                model.zero_grad()
            loss = model(batch(comm, step)).pow(2).mean()
            if how == "late":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.synchronize()
        seen += grads(model)
        return state_of(model) + seen

    both(train)


def test_accumulation_and_aborted_passes() -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(batch(comm, step)).pow(2).mean().backward()
            model(batch(comm, step + 50)).pow(2).mean().backward()
            if step % 3 == 2:  # not applied
                optimizer.zero_grad()
                model(batch(comm, step + 70)).pow(2).mean().backward()
            optimizer.step()
        return state_of(model)

    both(train)


def test_two_passes_before_step_are_right_and_warn() -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for part in range(2):
                model(batch(comm, step + 50 * part)).pow(2).mean().backward()
            optimizer.step()
        optimizer.flush()
        return [p.detach().clone() for p in model.parameters()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        later = run_ranks(
            lambda comm: train(comm, EveryStepNextForward(chunk_bytes=CHUNK_BYTES)), 2
        )
        assert {str(w.message).split(":")[0] for w in caught} == {
            "More than one backward pass before step()"
        }
        plain = run_ranks(lambda comm: train(comm, EveryStep()), 2)
    assert equal(*later)
    assert equal(later[0], plain[0])


@pytest.mark.parametrize("synchronizes", [False, True])
def test_two_passes_through_one_graph_are_right_and_warn(synchronizes: bool) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            y = model(batch(comm, step))
            y.pow(2).mean().backward(retain_graph=True)
            if synchronizes:
                optimizer.synchronize()
            y.abs().mean().backward()
            optimizer.step()
        return state_of(model)

    texts = both(train)
    assert any("More than one backward pass" in text for text in texts)


# ---- what is late, and what waits ----


class Held:
    """A run whose updates all wait for the next forward, past measuring and one step on."""

    def __init__(self, comm, model=None, inner=None, schedule=None, **options) -> None:
        self.comm = comm
        self.model = model or network()
        self.parameters = list(self.model.parameters())
        """Held from the beginning: the model, asked for them, would bring them up to date."""
        self.schedule = schedule or EveryStepNextForward(chunk_bytes=CHUNK_BYTES)
        self.optimizer = wrap(comm, self.schedule, self.model, inner, **options)
        for step in range(5):
            self.backward(step)
            self.optimizer.step()

    def backward(self, step) -> None:
        self.optimizer.zero_grad()
        self.model(batch(self.comm, step)).pow(2).mean().backward()

    def values(self):
        return [p.detach().clone() for p in self.parameters]


@pytest.fixture
def nothing_arrives(monkeypatch) -> None:
    """step() applies nothing immediately, as if the link were slow."""
    monkeypatch.setattr(BucketSet, "has_arrived", lambda self, parameter: False)


def test_a_layer_is_updated_just_before_it_runs(nothing_arrives) -> None:
    def rank_main(comm):
        run = Held(comm)
        old = run.values()
        assert len(run.schedule._updates) == len(old)
        hidden = run.model[:2](batch(comm, 9))
        now = run.values()
        assert not any(torch.equal(a, b) for a, b in zip(old[:4], now[:4], strict=True))
        assert equal(old[4:], now[4:])
        run.model[2:](hidden)
        assert not any(torch.equal(a, b) for a, b in zip(old, run.values(), strict=True))
        assert not run.schedule._updates

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    "look",
    [
        lambda run: run.model.state_dict(),
        lambda run: run.model[3].state_dict(),
        lambda run: run.optimizer.state_dict(),
        lambda run: run.optimizer.flush(),
        lambda run: run.optimizer.synchronize(),
        lambda run: run.optimizer.close(),
        lambda run: run.model.eval()(torch.ones(2, 5, dtype=torch.float64)),
        lambda run: torch.no_grad()(run.model[3])(torch.ones(2, 40, dtype=torch.float64)),
        lambda run: run.model.load_state_dict(copy.deepcopy(run.model.state_dict())),
    ],
)
def test_reading_all_parameters_waits(nothing_arrives, look) -> None:
    def rank_main(comm):
        run = Held(comm)
        old = run.values()
        look(run)
        assert not any(torch.equal(a, b) for a, b in zip(old, run.values(), strict=True))

    run_ranks(rank_main, 2)


def test_reading_the_state_before_all_is_applied_is_refused(nothing_arrives) -> None:
    def rank_main(comm):
        run = Held(comm)
        old = run.values()
        with pytest.raises(UsageError, match=r"Call optimizer\.synchronize\(\) first"):
            _ = run.optimizer.state
        assert equal(old, run.values())
        run.optimizer.synchronize()
        assert len(run.optimizer.state) == len(old)

    run_ranks(rank_main, 2)


def test_reading_the_learning_rate_after_step_waits_for_nothing(nothing_arrives) -> None:
    def rank_main(comm):
        run = Held(comm)
        assert run.optimizer.param_groups[0]["lr"] == 0.1
        assert run.schedule._updates
        assert not run.schedule.reasons

    run_ranks(rank_main, 2)


USES = {
    "clipped by norm": lambda ps, optimizer: torch.nn.utils.clip_grad_norm_(ps, 0.01),
    "clipped by value": lambda ps, optimizer: torch.nn.utils.clip_grad_value_(ps, 1e-4),
    "scaled": lambda ps, optimizer: [p.grad.mul_(2) for p in ps],
    "scaled through data": lambda ps, optimizer: [p.grad.data.mul_(2) for p in ps],
    "other data": lambda ps, optimizer: setattr(ps[2].grad, "data", ps[2].grad.data + 1),
    "replaced by what was used": lambda ps, optimizer: setattr(ps[0], "grad", ps[0].grad + 1),
    "replaced": lambda ps, optimizer: setattr(ps[3], "grad", torch.ones_like(ps[3])),
    "one of them cleared": lambda ps, optimizer: setattr(ps[1], "grad", None),
    "all of them cleared": lambda ps, optimizer: optimizer.inner.zero_grad(),
    "set to zeros": lambda ps, optimizer: optimizer.inner.zero_grad(set_to_none=False),
    "by foreach": lambda ps, optimizer: torch._foreach_mul_([p.grad for p in ps], 0.5),
    "on rank 0": lambda ps, optimizer: (
        ps[0].grad.norm().item() if optimizer.communicator.rank == 0 else None
    ),
}


@pytest.mark.filterwarnings("ignore:.*gradients were used between backward:RuntimeWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_is_the_mean_as_soon_as_it_is_used(use: str, view: bool) -> None:
    def train(comm, schedule):
        model = network()
        parameters = list(model.parameters())
        optimizer = wrap(comm, schedule, model, gradient_as_bucket_view=view)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            USES[use](parameters, optimizer)
            optimizer.step()
        return state_of(model)

    both(train)


def test_gradients_that_are_kept_keep_their_values() -> None:
    """Over zero_grad(), over step(), and as arrays and files."""

    def train(comm, schedule):
        model = network()
        parameters = list(model.parameters())
        optimizer = wrap(comm, schedule, model)
        kept = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            kept += [p.grad for p in parameters]
            if step % 3 == 0:  # not applied
                optimizer.zero_grad()
                model(batch(comm, step + 70)).pow(2).mean().backward()
            kept.append(copy.deepcopy(parameters[0].grad))
            optimizer.step()
        return state_of(model) + [gradient + 0 for gradient in kept]

    both(train)


@pytest.mark.filterwarnings("ignore:.*gradients were used between backward:RuntimeWarning")
@pytest.mark.parametrize("zero_fill", [False, True])
def test_a_gradient_that_only_another_rank_has_is_there_too(zero_fill: bool) -> None:
    def train(comm, schedule):
        model = nn.ModuleDict({"used": network(), "rare": network(), "never": network()})
        parameters = list(model.parameters())
        optimizer = wrap(comm, schedule, model, zero_fill=zero_fill)
        seen = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model["used"](batch(comm, step)).pow(2).mean()
            if comm.rank == 1:
                loss = loss + model["rare"](batch(comm, step)).pow(2).mean()
            loss.backward()
            seen.append(torch.tensor([p.grad is not None for p in parameters]))
            seen.append(torch.nn.utils.clip_grad_norm_(parameters, 0.01))
            optimizer.step()
        return [p.detach().clone() for p in parameters] + seen

    both(train)


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_after_step_are_the_means(nothing_arrives, clears: bool) -> None:
    def train(comm, schedule):
        model = network()
        parameters = list(model.parameters())
        optimizer = wrap(comm, schedule, model)
        norms = []
        for step in range(NUM_STEPS):
            if clears:
                optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
            norms += [p.grad.norm() for p in parameters]
        return state_of(model) + norms

    both(train)


def test_what_is_not_used_costs_no_memory() -> None:
    def rank_main(comm):
        run = Held(comm)
        run.backward(6)
        for parameter in run.parameters:
            gradient = parameter.grad
            assert gradient.shape == parameter.shape
            assert gradient.dtype == parameter.dtype
            assert not run.schedule._is_exposed
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.grad.untyped_storage().nbytes() == 8 for p in run.parameters)
            references = [weakref.ref(p.grad) for p in run.parameters]
        del gradient
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert not any(reference() is not None for reference in references)

    run_ranks(rank_main, 2)


CHANGES = {
    "clamped through data": lambda model: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()],
    "one of them": lambda model: model[3].weight.data.clamp_(-0.05, 0.05),
    "without gradients": torch.no_grad()(lambda model: model[3].weight.clamp_(-0.05, 0.05)),
    "by apply": lambda model: model.apply(
        lambda m: m.weight.data.mul_(0.9) if isinstance(m, nn.Linear) else None
    ),
    "other data": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 0.9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_come_from_the_model_may_be_changed(nothing_arrives, change: str) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
            CHANGES[change](model)
            average.update_parameters(model)
        return state_of(model) + state_of(average)

    both(train)


HELD_CHANGES = {
    "in place": torch.no_grad()(lambda p: p.clamp_(-0.1, 0.1)),
    "through data": lambda p: p.data.clamp_(-0.1, 0.1),
    "one bit": lambda p: p.data.view(torch.int64)[0, 0].bitwise_xor_(1),
}


@pytest.mark.parametrize("change", HELD_CHANGES)
def test_a_held_parameter_that_was_changed_is_refused_by_name(nothing_arrives, change: str) -> None:
    def rank_main(comm):
        run = Held(comm)
        HELD_CHANGES[change](run.parameters[4])
        with pytest.raises(UsageError, match=r"'3\.weight' was changed between step\(\).*flush"):
            run.model(batch(comm, 9))

    run_ranks(rank_main, 2)


CLIPS = {
    "torch": lambda o: torch.nn.utils.clip_grad_norm_(
        [p for g in o.param_groups for p in g["params"]], 0.01
    ),
    "ours": lambda o: o.clip_grad_norm_(0.01),
    "synchronize": lambda o: (
        o.synchronize(),
        torch.nn.utils.clip_grad_norm_(
            [p for g in o.inner.param_groups for p in g["params"]], 0.01
        ),
    ),
}


@pytest.mark.parametrize("kind", CLIPS)
def test_clipping_waits_for_all_gradients(kind: str) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            CLIPS[kind](optimizer)
            optimizer.step()
        return state_of(model)

    texts = both(train)
    assert len(texts) == (kind != "synchronize")
    assert all("nothing of it overlaps" in text for text in texts)


def test_max_grad_norm_reports_at_once_that_it_waits() -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model, max_grad_norm=0.01)
        if isinstance(schedule, EveryStepNextForward):
            assert "max_grad_norm" in next(iter(schedule.reasons))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        return state_of(model)

    both(train)


def test_a_grad_scaler_waits_and_skips_on_all_ranks() -> None:
    def train(comm, schedule):
        model = network().float()
        optimizer = wrap(comm, schedule, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        for step in range(NUM_STEPS + 2):
            optimizer.zero_grad()
            loss = model(batch(comm, step).float()).pow(2).mean()
            if step == 6 and comm.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert len(optimizer.nonfinite) == 1
        if isinstance(schedule, EveryStepNextForward):
            assert len(schedule.reasons) == 2
        return state_of(model)

    both(train)


def test_a_closure_waits_as_lbfgs_needs_it() -> None:
    def train(comm, schedule):
        model = network()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        optimizer = wrap(comm, schedule, model, inner)
        for step in range(5):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(batch(comm, step)).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return state_of(model)

    both(train)


def test_a_closure_now_and_then(nothing_arrives) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(batch(comm, step)).pow(2).mean()
                loss.backward()
                return loss

            if step % 3 == 2:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return state_of(model)

    both(train)


def test_step_hooks_see_all_gradients_once_per_step() -> None:
    def train(comm, schedule):
        model = network()
        inner = sgd(model)
        seen = []
        inner.register_step_pre_hook(lambda *_: seen.append(grads(model)))
        optimizer = wrap(comm, schedule, model, inner)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        assert len(seen) == NUM_STEPS
        return [g for gradients in seen for g in gradients]

    both(train)


class Coupled(torch.optim.SGD):
    """Could do anything."""


class Separable(torch.optim.SGD):
    is_separable = True


@pytest.mark.parametrize("kind", [Coupled, Separable])
def test_an_unknown_optimizer_is_not_split_unless_declared_separable(kind) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model, kind(model.parameters(), 0.1, momentum=0.9))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        if isinstance(schedule, EveryStepNextForward):
            assert (schedule.plan is None) == (kind is Coupled) == bool(schedule.reasons)
        return state_of(model)

    both(train)


# ---- which module reads which parameter ----


class Tied(nn.Module):
    """The embedding is the output layer as well, and another module reads a third's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.attention = nn.MultiheadAttention(6, 2)
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        fill(self.double())

    def forward(self, x):
        hidden = self.embed(x) * self.scale
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return F.linear(self.decode(self.encode(hidden).tanh()), self.embed.weight.t())


def test_shared_parameters_and_those_that_another_module_reads() -> None:
    def train(comm, schedule):
        model = Tied()
        optimizer = wrap(comm, schedule, model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        assert deferred(comm, schedule)
        return state_of(model)

    both(train)


class Changing(nn.Module):
    """Reads a parameter that it holds outside its module, but not in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.is_odd = False
        self.held = [self.second.weight]
        fill(self)

    def forward(self, x):
        if self.is_odd:
            return F.linear(x, self.held[0])
        return self.second(self.first(x))


@pytest.mark.parametrize("named", [(), ("second",), ("second.weight",)])
def test_a_parameter_that_is_read_where_it_never_was_is_an_error(nothing_arrives, named) -> None:
    def rank_main(comm):
        model = Changing()
        schedule = EveryStepNextForward(chunk_bytes=CHUNK_BYTES, eager_parameters=named)
        run = Held(comm, model, schedule=schedule)
        model.is_odd = True
        if named:
            run.backward(9)
            run.optimizer.step()
            return
        with pytest.raises(UnsupportedError, match=r"'second\.weight' was used before.*flush"):
            run.backward(9)

    run_ranks(rank_main, 2)


def test_without_forward_hooks_nothing_is_deferred() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x):
            return x

        def loss(self, x):
            y = F.linear(x, self.body[0].weight).tanh()
            return F.linear(y, self.body[3].weight).pow(2).mean()

    def rank_main(comm):
        model = Direct()
        schedule = EveryStepNextForward(chunk_bytes=CHUNK_BYTES)
        optimizer = wrap(comm, schedule, model, sgd(model))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model.loss(batch(comm, step)).backward()
            optimizer.step()
        assert schedule.plan is None

    with pytest.warns(RuntimeWarning, match="rank 0 did not see the model called"):
        run_ranks(rank_main, 2)


def test_functional_calls_run_the_hooks(nothing_arrives) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model)
        parameters = dict(model.named_parameters())
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            out = torch.func.functional_call(model, parameters, (batch(comm, step),))
            out.pow(2).mean().backward()
            optimizer.step()
        return state_of(model)

    both(train)


def test_evaluation_in_inference_mode_leaves_ordinary_state(nothing_arrives) -> None:
    def train(comm, schedule):
        model = network()
        optimizer = wrap(comm, schedule, model, torch.optim.Adam(model.parameters(), 0.01))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model.train()(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
            with torch.inference_mode():
                model.eval()(batch(comm, step))
        return state_of(model)

    both(train)


def test_copies_of_the_model_are_complete_and_left_alone(nothing_arrives) -> None:
    def rank_main(comm):
        run = Held(comm)
        twin = copy.deepcopy(run.model)
        again = pickle.loads(pickle.dumps(run.model))
        for name, value in run.model.state_dict().items():  # the updates were applied for them
            assert torch.equal(value, twin.state_dict()[name])
            assert torch.equal(value, again.state_dict()[name])
        for other in (twin, again):
            other(batch(comm, 9))
        run.backward(6)
        run.optimizer.step()

    run_ranks(rank_main, 2)


# ---- the rest of an optimizer's life ----


@pytest.mark.filterwarnings("ignore:(.|\n)*no multi-node optimizer trains them")
def test_layers_that_are_frozen_and_groups_that_are_added() -> None:
    def train(comm, schedule):
        model = nn.ModuleDict({"a": network(), "b": network()})
        optimizer = wrap(comm, schedule, model, sgd(model["a"]))
        for step in range(20):
            if step in (6, 13):
                model["a"][0].requires_grad_(step == 13)
            if step == 8:
                optimizer.add_param_group({"params": model["b"].parameters(), "lr": 0.01})
            optimizer.zero_grad()
            loss = model["a"](batch(comm, step)).pow(2).mean()
            if step >= 8:
                loss = loss + model["b"](batch(comm, step)).pow(2).mean()
            loss.backward()
            optimizer.step()
        assert deferred(comm, schedule)
        optimizer.flush()
        return [p.detach().clone() for p in model.parameters()]

    both(train)


def test_a_saved_state_is_complete_and_a_loaded_one_is_not_stepped_over(nothing_arrives) -> None:
    def rank_main(comm):
        run = Held(comm)
        saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        expected = run.values()
        run.backward(6)
        run.optimizer.step()
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        run.optimizer.flush()
        assert equal(run.values(), expected)

    run_ranks(rank_main, 2)


def test_values_that_only_overflow_when_encoded_stop_the_next_step() -> None:
    def rank_main(comm):
        run = Held(comm, codec="float16")
        run.optimizer.zero_grad()
        (run.model(batch(comm, 6)).pow(2).mean() * 1e12).backward()
        run.optimizer.step()  # each rank's gradients are finite
        run.backward(7)
        with pytest.raises(NonFiniteGradientError, match="step 5"):
            run.optimizer.step()

    run_ranks(rank_main, 2)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="chunk_bytes=0"):
        EveryStepNextForward(chunk_bytes=0)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_model_that_is_no_longer_used_is_freed_with_its_optimizer(is_closed: bool) -> None:
    def rank_main(comm):
        model = network()
        optimizer = wrap(comm, EveryStepNextForward(chunk_bytes=CHUNK_BYTES), model)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(batch(comm, step)).pow(2).mean().backward()
            optimizer.step()
        assert type(model[0].weight.grad) is GradientUnderWay
        optimizer.flush()
        if is_closed:
            optimizer.close()
            assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        return weakref.ref(model), weakref.ref(optimizer)

    references = run_ranks(rank_main, 2, name="hierarchical", topology=Topology(("a", "b")))
    gc.collect()
    assert [[reference() for reference in each] for each in references] == [[None, None]] * 2
