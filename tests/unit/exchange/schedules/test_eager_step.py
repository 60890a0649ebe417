"""Steps with own gradients: what is left of them when they are undone, which is nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tests.unit.models import batch, equal, grads, loss_of, mlp, near, train, values
from torchmn import create_multi_node_optimizer
from torchmn.errors import PerformanceWarning, UsageError
from torchmn.exchange.schedules import DoubleBuffering
from torchmn.testing import run_ranks

WORLDS = [1, 2, 3]
Edit = Callable[[nn.Module], None]
"""What a script does between backward() and step()."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


class SlowingSGD(torch.optim.SGD):
    """Keeps counts everywhere but in its state, and a state of its own for all parameters."""

    num_steps = 0

    def step(self, closure=None):
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        self.num_steps += 1
        total = self.state["all"].setdefault("total", torch.zeros(()))
        total += group["count"] * self.num_steps
        group["lr"] = 0.2 / float(1 + total)
        return super().step(closure)


def make_eager(comm, model, inner=adam, **options):
    schedule = DoubleBuffering(eager=True)
    return create_multi_node_optimizer(inner(model), comm, model, schedule=schedule, **options)


def wrap_eager(comm, inner=adam, **options):
    model = mlp()
    return model, make_eager(comm, model, inner, **options)


def reference(
    num_ranks: int,
    num_steps: int,
    inner=adam,
    *,
    edit: Edit = lambda model: None,
    combine=lambda own: sum(own) / len(own),
    scale: float = 1.0,
    edits_last: bool = False,
) -> list[Tensor]:
    """The same in one process: copies of everything in place of undoing.

    ``combine`` makes the mean of the ranks' gradients; an own one is ``scale`` times as long, or
    as long as the mean if that is shorter. ``flush`` knows the edits of hooks alone.
    """
    model = mlp()
    optimizer = inner(model)
    before: list[Tensor] | None = None
    ahead = [model] * num_ranks
    for step in range(num_steps):
        own = []
        for rank, each in enumerate(ahead):
            each.zero_grad()
            loss_of(each, batch(rank, step)).backward()
            own.append([p.grad.clone() for p in each.parameters()])
        mean = [combine(each) for each in zip(*own, strict=True)]
        ahead = [model] * num_ranks
        if before is not None:
            norm = stepped(model, optimizer, before, edit)
            ahead = []
            for gradients in own:
                other, its = copy.deepcopy((model, optimizer))  # without numbers of its own
                vars(its).update({k: v for k, v in vars(optimizer).items() if type(v) is int})
                factor = min(scale, norm / float(torch.nn.utils.get_total_norm(gradients)))
                stepped(other, its, [g * factor for g in gradients])
                ahead.append(other)
        before = mean
    stepped(model, optimizer, before, edit if edits_last else lambda model: None)
    return values(model)


def stepped(model, optimizer, gradients, edit: Edit = lambda model: None) -> float:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    edit(model)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.step()
    return norm


def trained(comm, steps=6, inner=adam, *, edit=lambda model: None, set_to_none=True, **options):
    """The parameters after flush()."""
    model, optimizer = wrap_eager(comm, inner, **options)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch(comm.rank, step)).backward()
        if step:
            edit(model)
        optimizer.step()
    optimizer.flush()
    return values(model)


def check(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    """All ranks hold the same bits, and those of the reference."""
    assert all(equal(result, results[0]) for result in results)
    assert near(results[0], expected)


# ---- against one process ----


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def decay_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)


def clip_by_parameters(model: nn.Module) -> None:
    """Adaptive gradient clipping, in one line."""
    for p in model.parameters():
        p.grad.mul_((0.02 * p.detach().norm() / p.grad.norm()).clamp(max=1))


def constrain(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("edit", [lambda _: None, clip, decay_by_hand, clip_by_parameters])
@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_with_own_gradients_and_undoes_them(world_size, edit) -> None:
    results = run_ranks(lambda comm: trained(comm, edit=edit), world_size)
    check(results, reference(world_size, 6, edit=edit))


def test_parameters_may_change_between_backward_and_step() -> None:
    check(
        run_ranks(lambda comm: trained(comm, inner=sgd, edit=constrain), 2),
        reference(2, 6, sgd, edit=constrain),
    )


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_in_place(set_to_none, as_view) -> None:
    options = {"set_to_none": set_to_none, "gradient_as_bucket_view": as_view}
    check(run_ranks(lambda comm: trained(comm, **options), 2), reference(2, 6))


def test_max_grad_norm() -> None:
    """Clips what the own gradients are compared with, in a hook."""

    def clip_(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)

    results = run_ranks(lambda comm: trained(comm, inner=sgd, max_grad_norm=0.001), 2)
    check(results, reference(2, 6, sgd, edit=clip_, edits_last=True))


def test_a_sum_over_ranks() -> None:
    results = run_ranks(lambda comm: trained(comm, inner=sgd, reduction="sum"), 2)
    check(results, reference(2, 6, sgd, combine=sum, scale=2.0))


@pytest.mark.parametrize(
    "inner",
    [
        sgd,
        lambda model: SlowingSGD(model.parameters(), 0.1, momentum=0.5),
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True),
        lambda model: torch.optim.AdamW(model.parameters(), 0.01, fused=True),
        lambda model: torch.optim.Adam(model.parameters(), torch.tensor(0.01), foreach=False),
        lambda model: torch.optim.NAdam(model.parameters(), 0.01, foreach=True),
        lambda model: torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.5, centered=True),
        lambda model: torch.optim.Adagrad(model.parameters(), 0.01),
        lambda model: torch.optim.ASGD(model.parameters(), 0.01, t0=2),
        lambda model: torch.optim.Adafactor(model.parameters(), 0.01),
    ],
    ids=["sgd", "counts", "amsgrad", "fused", "adam", "nadam", "rmsprop", "adagrad", "asgd", "af"],
)
def test_nothing_is_left_in_the_optimizer(inner) -> None:
    check(run_ranks(lambda comm: trained(comm, inner=inner), 2), reference(2, 6, inner))


@on_ranks(2)
def test_hooks_of_the_optimizer_see_steps_with_means_alone(comm):
    model, optimizer = wrap_eager(comm)
    average = torch.optim.swa_utils.AveragedModel(model)
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(grads(model)))
    optimizer.register_step_post_hook(lambda *_: after.append(values(model)))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    train(model, optimizer, comm.rank, range(5))
    assert (len(before), len(after), int(average.n_averaged)) == (4, 4, 4)
    optimizer.flush()
    assert len(after) == 5
    return [*sum(before, []), *sum(after, []), *values(average)]


# ---- where parameters are those of a step with the own gradient ----


def test_ranks_differ_from_forward_to_the_end_of_backward_alone() -> None:
    def rank_main(comm):
        model, optimizer = wrap_eager(comm)
        train(model, optimizer, comm.rank, range(3))
        shared = [*values(model), *grads(model)]
        shared += [s["exp_avg"].clone() for s in optimizer.state.values()]
        with torch.no_grad():
            model(batch(0, 3))
        model.eval()
        model(batch(0, 3))
        model.train()
        assert equal(values(model), shared[:4])
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, 3))
        ahead = values(model)
        loss.backward()
        shared += [*values(model), *grads(model)]
        optimizer.step()
        optimizer.flush()
        return shared + values(model), ahead

    (shared, ahead), (its_shared, its_ahead) = run_ranks(rank_main, 2)
    assert equal(shared, its_shared)
    assert not equal(ahead, its_ahead)
    assert equal(shared[:4], shared[12:16])


@on_ranks(2)
def test_a_copy_of_the_model_and_a_replica_check_see_what_ranks_share(comm) -> None:
    model, optimizer = wrap_eager(comm)
    train(model, optimizer, comm.rank, range(3))
    before = values(model)
    model(batch(comm.rank, 3))
    assert not equal(values(model), before)
    assert equal(values(copy.deepcopy(model)), before)
    model(batch(comm.rank, 3))
    assert equal(optimizer.replicated_tensors(), before)
    model(batch(comm.rank, 3))
    optimizer.close()
    assert equal(values(model), before)


@on_ranks(2)
def test_saving_changes_nothing(comm) -> None:
    results = []
    for saves in (False, True):
        model, optimizer = wrap_eager(comm)
        for step in range(5):
            train(model, optimizer, comm.rank, [step])
            if saves:
                model(batch(comm.rank, step))
                optimizer.state_dict()
        optimizer.flush()
        results.append(values(model))
    assert equal(*results)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "calls", [lambda model, x: model(x), lambda model, x: model[2](model[0](x))]
)
def test_a_model_that_is_trained_in_eval_or_layer_by_layer(calls, is_training) -> None:
    """The first pass is missed; from then on it is known."""

    def rank_main(comm):
        model = mlp().train(is_training)
        optimizer = make_eager(comm, model)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            before = values(model)
            loss = calls(model, batch(comm.rank, step)).pow(2).mean()
            seen.append(not equal(values(model), before))
            loss.backward()
            optimizer.step()
        optimizer.flush()
        return seen, values(model)

    (seen, after), (its_seen, its_after) = run_ranks(rank_main, 2)
    assert seen == its_seen
    assert seen[3:] == [True, True]
    assert equal(after, its_after)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@on_ranks(2)
def test_tracing_the_model_changes_nothing(comm) -> None:
    """Without its check, which calls the model as training does."""
    results = []
    for is_traced in (False, True):
        model, optimizer = wrap_eager(comm)
        train(model, optimizer, comm.rank, range(3))
        if is_traced:
            traced = torch.jit.trace(model, batch(comm.rank, 0), check_trace=False)
            assert torch.equal(traced(batch(1, 1)), model.eval()(batch(1, 1)))
            model.train()
        train(model, optimizer, comm.rank, range(3, 6))
        optimizer.flush()
        results.append(values(model))
    assert equal(*results)


def test_a_model_that_is_never_called_is_named_in_a_warning() -> None:
    def rank_main(comm):
        model, optimizer = wrap_eager(comm)
        for step in range(5):
            optimizer.zero_grad()
            hidden = batch(comm.rank, step) @ model[0].weight.T
            hidden.pow(2).mean().backward()
            optimizer.step()
        optimizer.flush()

    with pytest.warns(PerformanceWarning, match="eager=True.* has no effect on some passes"):
        run_ranks(rank_main, 1)


# ---- changes by the script ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_change_between_forward_and_backward_is_refused(dtype) -> None:
    """The smallest one: a sign."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(3)
            self.weight = nn.Parameter(torch.randn(300, 70, generator=generator, dtype=dtype))

        def forward(self, factor: int) -> Tensor:
            return (self.weight * factor).abs().pow(2).mean()

    def rank_main(comm):
        model = Weight()
        optimizer = make_eager(comm, model, sgd)

        def pass_(change=lambda: None) -> None:
            optimizer.zero_grad()
            loss = model(1 + comm.rank)
            change()
            loss.backward()
            optimizer.step()

        def negate_one() -> None:
            model.weight.data[7, 5] *= -1

        for _ in range(3):
            pass_()
        with pytest.raises(UsageError, match="between forward and backward: 'weight'"):
            pass_(negate_one)
        pass_()
        optimizer.flush()
        return values(model)

    assert equal(*run_ranks(rank_main, 2))


@on_ranks(2)
def test_closing_keeps_what_the_script_has_loaded(comm) -> None:
    model, optimizer = wrap_eager(comm)
    train(model, optimizer, comm.rank, range(2))
    shared = values(model)
    model(batch(comm.rank, 2))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.close()
    assert equal(values(model), [torch.full_like(shared[0], 0.5), *shared[1:]])


# ---- ranks without an own gradient ----


def test_ranks_that_leave_early() -> None:
    def rank_main(comm):
        model, optimizer = wrap_eager(comm)
        with optimizer.join():
            train(model, optimizer, comm.rank, range(6 - 2 * comm.rank))
        joined = values(model)
        train(model, optimizer, comm.rank, range(2))
        optimizer.flush()
        return joined, values(model)

    (joined, after), *others = run_ranks(rank_main, 3)
    for other in others:
        assert equal(joined, other[0])
        assert equal(after, other[1])


@pytest.mark.parametrize("without", ["a finite gradient", "a weight"])
@on_ranks(2)
def test_a_rank_takes_no_step_without(comm, without: str) -> None:
    model, optimizer = wrap_eager(comm, on_nonfinite="ignore")
    for step in range(3):
        optimizer.zero_grad()
        optimizer.set_weight(0.0 if comm.rank == 1 and without == "a weight" else 1.0)
        loss = loss_of(model, batch(comm.rank, step))
        is_bad = comm.rank == 1 and step == 2 and without == "a finite gradient"
        (loss * (float("nan") if is_bad else 1.0)).backward()
        optimizer.step()
    assert bool(optimizer.state_dict()["torchmn"]["ahead"]) == (comm.rank == 0)
    optimizer.close()


def test_a_gradient_of_a_pass_that_raised_is_forgotten() -> None:
    """Its parameter has none in the next pass."""

    def fail(_):
        raise ArithmeticError

    def rank_main(comm):
        model = [mlp(), mlp(1)]
        inner = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], 0.1)
        optimizer = make_eager(comm, model, lambda _: inner)

        def pass_(step, *used, fails=False) -> list[Tensor]:
            optimizer.zero_grad()
            x = batch(comm.rank, step)
            if fails:
                x = x.clone().requires_grad_()
                x.register_hook(fail)
            loss = sum(loss_of(model[i], x) for i in used)
            ahead = values(model[1])
            loss.backward()
            optimizer.step()
            return ahead

        for step in range(3):
            pass_(step, 0, 1)
        with pytest.raises(ArithmeticError):
            pass_(3, 0, 1, fails=True)
        pass_(4, 0)
        ahead = pass_(5, 0)
        optimizer.flush()
        return ahead

    assert equal(*run_ranks(rank_main, 2))
