"""A chain of links over ranks, beyond the contracts of its results."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.contracts.suites.communicator_contracts import seeded
from tests.limits import limit
from torchmn.comm import Communicator, Grid
from torchmn.comm.waiting import Wait
from torchmn.errors import CommunicationError, UnknownNameError, UnsupportedError, UsageError
from torchmn.exchange.optimizer import create_multi_node_optimizer
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, PeriodicAverage
from torchmn.nn import MultiNodeChainList, convert_batch_norm
from torchmn.testing import run_ranks

mse = nn.functional.mse_loss


def layer(rank: int, kind: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """The part of a rank, the same wherever it is made."""
    linear = nn.Linear(3, 3, dtype=torch.float64, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.copy_(seeded(rank, 3, 3) / 10)
        linear.bias.copy_(seeded(rank, 3) / 10)
    return nn.Sequential(kind(), linear)


def layers(size: int, kind: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """The parts of all ranks in one process."""
    return nn.Sequential(*(layer(rank, kind) for rank in range(size)))


def require_gradients(chain: nn.Module, part: nn.Module) -> None:
    for own, expected in zip(chain.parameters(), part.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=1e-12)


def line(comm: Communicator, part: nn.Module | None = None, **options: Any) -> MultiNodeChainList:
    chain = MultiNodeChainList(comm, **options)
    rank, last = comm.rank, comm.size - 1
    chain.add_link(
        layer(rank) if part is None else part,
        rank - 1 if rank else None,
        rank + 1 if rank < last else None,
    )
    return chain


def batch(num: int = 6, salt: int = 0) -> tuple[Tensor, Tensor]:
    return seeded(0, num, 3, salt=1 + salt), seeded(1, num, 3, salt=1 + salt)


def errors_of(function: Callable[[Communicator], object], size: int, **options: Any) -> list[str]:
    """What each rank raises."""

    def run(comm: Communicator) -> str:
        try:
            function(comm)
        except (UsageError, UnsupportedError, CommunicationError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(run, size, **options)


def test_links_that_do_not_fit_raise_on_all_ranks() -> None:
    def run(comm: Communicator) -> None:
        chain = MultiNodeChainList(comm)
        chain.add_link(layer(comm.rank), None if comm.rank == 0 else 1, 1)
        chain.forward_backward(*batch(), mse)

    seen = errors_of(run, 3)
    assert len(set(seen)) == 1
    assert "The links of rank 0: 0 (Sequential, test_chain_list.py:" in seen[0]
    assert "The links of rank 1: 0 (" in seen[0]


def test_different_options_raise_on_all_ranks() -> None:
    seen = errors_of(
        lambda comm: line(comm, num_microbatches=1 + comm.rank).forward_backward(*batch(), mse), 2
    )
    assert all("different num_microbatches: rank 0: 1; rank 1: 2" in text for text in seen)


def test_arguments() -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="num_microbatches=0"):
            MultiNodeChainList(comm, num_microbatches=0)
        chain = line(comm, num_microbatches=2)
        with pytest.raises(UnknownNameError):
            chain.forward_backward(*batch(), mse, reduction="max")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="inputs=None"):
            chain.forward_backward(None, None, mse)
        with pytest.raises(UsageError, match=r"\[5, 6\] in dim 0"):
            chain.forward_backward((batch()[0], batch(5)[0]), None, mse)
        with pytest.raises(UsageError, match="no samples"):
            chain.forward_backward(batch(0)[0], None, mse)
        with pytest.raises(UsageError, match="one element, not \\[3, 3\\]"):
            chain.forward_backward(batch()[0])
        with pytest.raises(UsageError, match="after the chain has run"):
            chain.add_link(nn.Identity())

    run_ranks(run, 1)


def test_inputs_and_targets_of_different_batches() -> None:
    seen = errors_of(
        lambda comm: line(comm, num_microbatches=2).forward_backward(batch(6)[0], batch(4)[1], mse),
        2,
    )
    assert "targets of 4 samples, but the inputs that reach it have 6" in seen[1]


def test_a_rank_that_does_not_take_part_is_named_with_both_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with what the other ranks, which only processes ask, have said."""
    monkeypatch.setattr(Wait, "reason", "Rank 0 sleeps.")

    def run(comm: Communicator) -> None:
        chain = line(comm, num_microbatches=2)
        chain.forward_backward(*batch(), mse)
        if comm.rank == 1:
            chain.forward_backward(*batch(), mse)
        comm.barrier()

    seen = errors_of(run, 2, timeout_s=limit(0.5))
    assert seen[1].startswith("TimeLimitError: rank 1 of 2")
    assert "waits for the output of link 0 of rank 0 (Sequential, test_chain_list.py" in seen[1]
    assert "for link 0 of rank 1 (Sequential" in seen[1]
    assert f"rank 0 has not answered within {limit(0.5):g} s. Rank 0 sleeps. It may" in seen[1]


def test_a_delegate_that_no_backward_reaches_is_named() -> None:
    def run(comm: Communicator) -> None:
        output = line(comm)(batch()[0])
        if comm.rank == 0:
            output.backward()
        comm.barrier()

    assert "the gradient that link 0 of rank 1" in errors_of(run, 2, timeout_s=limit(0.5))[0]


def test_calls_of_different_kinds() -> None:
    """Forward alone on one rank, all of it on the other."""

    def run(comm: Communicator) -> None:
        chain = line(comm)
        chain.forward_backward(*batch(), mse)
        if comm.rank == 0:
            with torch.no_grad():
                chain(batch()[0])
        else:
            chain.forward_backward(*batch(), mse)
        chain.forward_backward(*batch(), mse)

    seen = errors_of(run, 2, timeout_s=limit(1))
    assert "the gradient that" in seen[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes of exceptions")
def test_an_error_of_a_link_says_what_it_got_from_where() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x], 1)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        run_ranks(
            lambda comm: line(comm, Wide() if comm.rank == 0 else None).forward_backward(
                *batch(), mse
            ),
            2,
        )
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1 of 2")
    assert "the inputs of link 0 of rank 1 (Sequential, " in note
    assert "are float64 (6, 6) from link 0 of rank 0 (Wide, test_chain_list.py:" in note


def test_an_object_that_cannot_be_sent() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> object:
            return object()

    seen = errors_of(
        lambda comm: line(comm, Odd() if comm.rank == 0 else None).forward_backward(*batch(), mse),
        2,
    )
    assert "a type that links cannot exchange" in seen[0]


def test_a_link_may_begin_with_an_operation_in_place() -> None:
    def run(comm: Communicator) -> None:
        chain = line(comm, layer(comm.rank, lambda: nn.ReLU(inplace=True)), num_microbatches=2)
        x, t = batch()
        chain.forward_backward(x.clone(), t, mse)
        whole = layers(comm.size, nn.ReLU)
        mse(whole(x), t).backward()
        require_gradients(chain, whole[comm.rank])

    run_ranks(run, 3)


def test_a_chain_is_not_used_after_a_failure() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    def run(comm: Communicator) -> None:
        chain = line(comm, Fails() if comm.rank else None)
        with pytest.raises((ValueError, CommunicationError)):
            chain.forward_backward(*batch(), mse)
        chain.forward_backward(*batch(), mse)

    for seen in errors_of(run, 2, timeout_s=limit(1)):
        assert "this chain cannot be used after a call that has failed" in seen


def test_a_loss_of_a_later_output() -> None:
    """Backward reaches the ranks that only the first output depends on."""

    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"first": b, "later": a, "sizes": torch.tensor([len(a)])}

    def run(comm: Communicator) -> None:
        chain = MultiNodeChainList(comm)
        if comm.rank < 2:
            chain.add_link(layer(comm.rank), rank_out=2)
        else:
            chain.add_link(Both(), rank_in=[0, 1])
        output = chain(batch()[0])
        (output["later"].sum() if comm.rank == 2 else output).backward()
        assert all((p.grad is None) == (comm.rank == 1) for p in chain.parameters())

    run_ranks(run, 3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_of_another_rank_are_not_differentiated_again() -> None:
    def run(comm: Communicator) -> None:
        chain = line(comm)
        output = chain(batch()[0])
        (output.sum() if comm.rank else output).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in chain.parameters() if p.grad is not None)
        assert isinstance(penalty, Tensor)
        if comm.rank == 0:
            penalty.backward()
        comm.barrier()

    seen = errors_of(run, 2, timeout_s=limit(1))
    assert "differentiated again, which chains cannot do" in seen[0]


def test_a_part_that_is_frozen() -> None:
    def run(comm: Communicator) -> None:
        chain = line(comm, num_microbatches=2)
        if comm.rank == 0:
            chain.requires_grad_(False)
        chain.forward_backward(*batch(), mse)
        assert all((p.grad is None) == (comm.rank == 0) for p in chain.parameters())

    run_ranks(run, 2)


def test_a_copy_of_a_class_of_the_script() -> None:
    """ChainerMN's way to write a chain: its constructor has other arguments."""

    class Model(MultiNodeChainList):
        def __init__(self, comm: Communicator, width: int) -> None:
            super().__init__(comm, num_microbatches=2)
            self.width = width
            last = comm.size - 1
            self.add_link(layer(comm.rank), None if comm.rank == 0 else 0, (1, None)[comm.rank])
            self.register_forward_hook(lambda *_: seen.append(last))

    seen: list[int] = []

    def run(comm: Communicator) -> None:
        chain = Model(comm, 3)
        chain.forward_backward(*batch(), mse)
        average = AveragedModel(chain)
        copied = average.module
        assert copied.width == 3
        assert copied.communicator is comm
        outputs = [each(batch()[0]) for each in (copied, chain)]
        assert torch.equal(*outputs)
        copied.zero_grad()
        copied.forward_backward(*batch(), mse)
        for seen_grad, grad in zip(copied.parameters(), chain.parameters(), strict=True):
            assert torch.equal(seen_grad.grad, grad.grad)
        with pytest.raises(UnsupportedError, match="cannot be pickled. Save state_dict"):
            pickle.dumps(line(comm))

    run_ranks(run, 2)
    assert len(seen) == 4


def test_a_mean_over_something_else_than_samples() -> None:
    """As with tokens, of which some are padding: all of those of the second micro-batch."""

    def run(comm: Communicator) -> None:
        x, _ = batch(6)
        t = torch.tensor([0, 1, 2, -100, -100, -100])
        chain = line(comm, num_microbatches=2)
        loss = chain.forward_backward(
            x, t, nn.functional.cross_entropy, count=lambda t: int((t >= 0).sum())
        )
        whole = layers(comm.size)
        expected = nn.functional.cross_entropy(whole(x), t)
        expected.backward()
        if loss is not None:
            assert abs(loss - expected) < 1e-12
        require_gradients(chain, whole[comm.rank])

    run_ranks(run, 2)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_the_norm_of_all_ranks(norm_type: float) -> None:
    def run(comm: Communicator) -> None:
        chain = line(comm)
        x, t = batch()
        chain.forward_backward(x, t, mse)
        whole = layers(comm.size)
        mse(whole(x), t).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)
        assert abs(chain.clip_grad_norm_(0.5, norm_type) - expected) < 1e-12
        require_gradients(chain, whole[comm.rank])

    run_ranks(run, 3)


class Overflows(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("inf")


def test_scalers_of_all_ranks_leave_the_same_steps_out() -> None:
    def run(comm: Communicator) -> tuple[float, bool]:
        class Overflowing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.part = layer(comm.rank)
                self.is_bad = False

            def forward(self, x: Tensor) -> Tensor:
                # Below the parameters of the last rank, whose own gradients stay finite.
                return self.part(Overflows.apply(x) if self.is_bad else x)

        part = Overflowing()
        chain = line(comm, part, num_microbatches=2)
        optimizer = torch.optim.SGD(chain.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales = []
        for is_bad in (False, True, False):
            part.is_bad = is_bad and comm.rank == comm.size - 1
            before = [p.detach().clone() for p in chain.parameters()]
            optimizer.zero_grad()
            chain.forward_backward(*batch(), mse, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            is_same = all(map(torch.equal, before, chain.parameters()))
            assert is_same == is_bad, comm.rank
            scales.append(scaler.get_scale())
        return tuple(scales)  # type: ignore[return-value]

    assert set(run_ranks(run, 3)) == {(4.0, 2.0, 2.0)}


SCHEDULES: dict[str, Callable[[], dict[str, Any]]] = {
    "every_step, ranks weigh the same": lambda: {"weight": "rank"},
    "every_step in 16 bits": lambda: {"codec": "float16"},
    "double_buffering": lambda: {"schedule": "double_buffering"},
    "periodic_average": lambda: {"schedule": PeriodicAverage(16)},
    "diloco": lambda: {"schedule": DiLoCo(16)},
    "block_momentum": lambda: {"schedule": BlockMomentum(16)},
}


def trained_over(data: Communicator, model: nn.Module, **options: Any) -> None:
    """Six steps on this rank's part of each batch."""
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = create_multi_node_optimizer(sgd, data, model, **{"weight": "samples", **options})
    for step in range(6):
        num = (8, 6, 3)[step % 3]
        x, t = batch(num, salt=step % 2)
        part = slice(*((0, num - 2), (num - 2, num))[data.rank])
        optimizer.zero_grad()
        if isinstance(model, MultiNodeChainList):
            model.forward_backward(x[part], t[part], mse)
        else:
            mse(model(x[part]), t[part]).backward()
        optimizer.step()
    optimizer.flush()
    if "schedule" not in options:
        assert optimizer.reducer.num_passes == 6  # of a chain the micro-batches are one pass


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_along_a_data_axis(name: str) -> None:
    """As of the whole model on the two ranks, also where a micro-batch has no samples."""

    def run(comm: Communicator) -> None:
        grid = Grid(comm, data=2, model=2)
        chain = line(grid.model, num_microbatches=4)
        whole = layers(2)
        for model in (chain, whole):
            trained_over(grid.data, model, **SCHEDULES[name]())
        bound = 1e-2 if "16 bits" in name else 1e-12
        own = whole[grid.model.rank].parameters()
        for seen, expected in zip(chain.parameters(), own, strict=True):
            torch.testing.assert_close(seen, expected, rtol=0, atol=bound)
        grid.finalize()

    run_ranks(run, 4)


@pytest.mark.parametrize("weight", ["rank", "samples"])
@pytest.mark.parametrize("sizes", [(4, 3), (3, 5), (1, 4), (7, 10)])
def test_normalization_over_chains_of_uneven_batches(
    sizes: tuple[int, int], weight: Literal["rank", "samples"]
) -> None:
    """Some micro-batches have samples in one chain only."""
    num_parts = 4

    def part(rank: int) -> nn.Sequential:
        norm = nn.BatchNorm1d(1, momentum=None, dtype=torch.float64)
        return nn.Sequential(layer(rank), nn.Unflatten(1, (1, 3)), norm, nn.Flatten())

    def drawn(step: int) -> list[tuple[Tensor, Tensor]]:
        return [batch(num, salt=2 * step + copy) for copy, num in enumerate(sizes)]

    def in_one_process() -> list[nn.Module]:
        parts = [part(0), part(1)]
        whole = nn.Sequential(*parts)
        optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            cut = [[each.tensor_split(num_parts) for each in pair] for pair in drawn(step)]
            for index in range(num_parts):
                outputs = whole(torch.cat([x[index] for x, _ in cut])).split(
                    [len(x[index]) for x, _ in cut]
                )
                for (_, t), output, size in zip(cut, outputs, sizes, strict=True):
                    num = sum(sizes) if weight == "samples" else 2 * size
                    loss = mse(output, t[index], reduction="sum") / 3 / num
                    loss.backward(retain_graph=True)
            optimizer.step()
        return [*parts]

    expected = in_one_process()

    def run(comm: Communicator) -> None:
        grid = Grid(comm, data=2, model=2)
        own = convert_batch_norm(part(grid.model.rank), grid.data, loss_weight=weight)
        chain = line(grid.model, own, num_microbatches=num_parts)
        inner = torch.optim.SGD(chain.parameters(), 0.1, momentum=0.9)
        given = {"weight": "samples"} if weight == "samples" else {}
        optimizer = create_multi_node_optimizer(inner, grid.data, chain, **given)
        for step in range(2):
            optimizer.zero_grad()
            chain.forward_backward(*drawn(step)[grid.data.rank], mse)
            optimizer.step()
        theirs = expected[grid.model.rank].state_dict()
        for name, values in own.state_dict().items():
            torch.testing.assert_close(values, theirs[name], rtol=1e-10, atol=1e-12)

    run_ranks(run, 4)


def test_what_an_optimizer_refuses() -> None:
    def run(comm: Communicator) -> None:
        chain = line(comm)
        with pytest.raises(UsageError, match="is the communicator of the chain"):
            create_multi_node_optimizer(torch.optim.SGD(chain.parameters(), 0.1), comm, chain)
        alone = comm.split(comm.rank, 0)
        with pytest.raises(UnsupportedError, match=r"chain\.clip_grad_norm_"):
            create_multi_node_optimizer(
                torch.optim.SGD(chain.parameters(), 0.1), alone, chain, max_grad_norm=1.0
            )
        alone.finalize()

    run_ranks(run, 2)


def test_autocast() -> None:
    """Activations are sent in the dtype that the link returns."""

    def run(comm: Communicator) -> None:
        seen: list[torch.dtype] = []

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                seen.append(x.dtype)
                return self.linear(x)

        chain = line(comm, Part(), num_microbatches=2)
        x, t = (each.float() for each in batch())
        with torch.autocast("cpu", torch.bfloat16):
            loss = chain.forward_backward(x, t, lambda y, t: mse(y.float(), t))
        assert set(seen) == {torch.float32 if comm.rank == 0 else torch.bfloat16}
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in chain.parameters())
        assert (loss is None) == (comm.rank == 0)

    run_ranks(run, 2)
