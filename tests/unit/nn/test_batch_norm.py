"""Conversion, copies, compilation and errors of batch normalization over ranks."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from torchmn import create_multi_node_optimizer
from torchmn.cluster import Topology
from torchmn.errors import RankMismatchError, UnknownNameError, UnsupportedError, UsageError
from torchmn.nn import (
    MultiNodeBatchNorm1d,
    MultiNodeBatchNorm2d,
    convert_batch_norm,
    create_mnbn_model,
    revert_batch_norm,
)
from torchmn.nn.batch_norm import _sums
from torchmn.testing import run_ranks

TWO_NODES = Topology.blocks([1, 1])


def network() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 2)).double()


def rows(rank: int, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, 3, generator=generator, dtype=torch.float64)


class AsOnCuda(TorchDispatchMode):
    """The sums of batch normalization from the arguments from which CUDA's kernel takes them."""

    num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.native_batch_norm_backward.default:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        dy, x, _, _, _, mean, inverse, _, _, mask = args
        assert mask == [False, True, True]
        assert isinstance(mean, torch.Tensor), "refused on CUDA"
        assert isinstance(inverse, torch.Tensor), "refused on CUDA"
        dims = [dim for dim in range(x.dim()) if dim != 1]
        deviation = x - mean.view(1, -1, *[1] * (x.dim() - 2))
        return None, (dy * deviation).sum(dims) * inverse, dy.sum(dims)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 2)])
def test_sums_are_those_of_cuda_too(shape: tuple[int, ...]) -> None:
    dy, x = torch.randn(2, *shape, dtype=torch.float64)
    center = x.transpose(0, 1).flatten(1).mean(1)
    expected = _sums(dy, x, center)
    with AsOnCuda() as cuda:
        found = _sums(dy, x, center)
    assert cuda.num_calls == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_converts_in_place_and_back() -> None:
    def rank_main(comm):
        model = network()
        layer, state = model[0][1], {k: v.clone() for k, v in model.state_dict().items()}
        calls = []
        layer.register_forward_hook(lambda *_: calls.append(1))
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        assert create_mnbn_model(model, comm) is model
        assert type(layer) is MultiNodeBatchNorm1d
        assert model[0][1] is layer
        assert isinstance(layer, nn.BatchNorm1d)
        assert layer.comm is comm
        assert "2 ranks" in repr(model)
        model(rows(comm.rank)).sum().backward()
        sgd.step()
        assert calls == [1]
        assert not torch.equal(layer.weight, state["0.1.weight"])
        model.load_state_dict(state)
        assert revert_batch_norm(model) is model
        assert type(layer) is nn.BatchNorm1d
        assert set(vars(layer)) == set(vars(nn.BatchNorm1d(4)))
        model(rows(comm.rank))
        assert calls == [1, 1]

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("other", [nn.SyncBatchNorm(3), nn.LazyBatchNorm2d()])
def test_other_classes_are_named_before_anything_is_changed(other: nn.Module) -> None:
    def rank_main(comm):
        model = nn.Sequential(nn.BatchNorm2d(3), other)
        with pytest.raises(UnsupportedError, match=f"'1' is a {type(other).__name__}"):
            convert_batch_norm(model, comm)
        assert type(model[0]) is nn.BatchNorm2d
        with pytest.raises(UnknownNameError, match="loss_weight"):
            MultiNodeBatchNorm2d(3, comm, loss_weight="tokens")  # type: ignore[arg-type]
        with pytest.raises(UnknownNameError, match="loss_weight"):
            convert_batch_norm(model[0], comm, loss_weight="tokens")  # type: ignore[arg-type]
        assert type(model[0]) is nn.BatchNorm2d

    run_ranks(rank_main, 1)


def test_parametrized_after_conversion() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    def rank_main(comm):
        plain, model = network(), convert_batch_norm(network(), comm)
        comm.bcast_data(plain)
        model.load_state_dict(plain.state_dict())
        for each in (plain, model):
            parametrize.register_parametrization(each[0][1], "weight", Doubled())
        convert_batch_norm(model, comm)
        for each in (model, copy.deepcopy(model)):
            y = each(rows(comm.rank))
            whole = plain(torch.cat([rows(0), rows(1)]))
            torch.testing.assert_close(y, whole[3 * comm.rank : 3 * comm.rank + 3])
        before = vars(model[0][1]).copy()
        with pytest.raises(UnsupportedError, match=r"'0.1' is a Parametrized.*Remove its param"):
            revert_batch_norm(model)
        assert vars(model[0][1]) == before
        with pytest.raises(UnsupportedError, match="parametrize after converting"):
            convert_batch_norm(plain, comm)

    run_ranks(rank_main, 2)


def _by_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_copies_share_the_ranks_and_pickles_need_new_ones() -> None:
    def rank_main(comm):
        model = convert_batch_norm(network(), comm)
        for other in (copy.deepcopy(model), copy.copy(model)):
            assert other[0][1].comm is comm
            torch.testing.assert_close(other(rows(comm.rank)), model(rows(comm.rank)))
        for kept in (_by_torch, lambda model: pickle.loads(pickle.dumps(model))):
            other = kept(model)
            assert "no ranks" in repr(other)
            assert torch.equal(other.eval()(rows(0)), model.eval()(rows(0)))
            other.train()
            model.train()
            with pytest.raises(UsageError, match="loaded from a pickle.*convert_batch_norm"):
                other(rows(comm.rank))
            convert_batch_norm(other, comm)
            assert torch.equal(other(rows(comm.rank)), model(rows(comm.rank)))

    run_ranks(rank_main, 2)


def test_ranks_in_different_layers_are_named() -> None:
    def rank_main(comm):
        first = convert_batch_norm(nn.BatchNorm1d(3).double(), comm)
        second = convert_batch_norm(nn.BatchNorm1d(3).double(), comm)
        second(first(rows(comm.rank)))
        with pytest.raises(RankMismatchError, match="rank 0: forward of.* 1 .*rank 1: .* 2 "):
            (first if comm.rank == 0 else second)(rows(comm.rank))
        first(rows(comm.rank))  # they may continue together

    run_ranks(rank_main, 2)


def test_one_value_for_each_channel_raises_on_all_ranks() -> None:
    def rank_main(comm):
        layer = convert_batch_norm(nn.BatchNorm1d(3).double(), comm)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(rows(0, 1 - comm.rank))
        with pytest.raises(ValueError, match="2D or 3D"):
            layer(torch.zeros(2, 3, 4, 5))

    run_ranks(rank_main, 2)


def test_no_samples_at_all_change_no_statistics() -> None:
    def rank_main(comm):
        for momentum in (0.1, None):
            layer = convert_batch_norm(nn.BatchNorm1d(3, momentum=momentum).double(), comm)
            layer(rows(0, 0))
            layer(rows(comm.rank))
            before = copy.deepcopy(layer.state_dict())
            assert layer(rows(0, 0).requires_grad_()).shape == (0, 3)
            for name, values in layer.state_dict().items():
                assert torch.equal(values, before[name])
            assert layer.num_batches_tracked == 1

    run_ranks(rank_main, 2)


def test_gradients_of_gradients_are_refused() -> None:
    """Also where the gradient that comes in is a constant."""

    def rank_main(comm):
        layer = convert_batch_norm(nn.BatchNorm1d(3).double(), comm)
        x = rows(comm.rank).requires_grad_()
        (dx,) = torch.autograd.grad(layer(x)[:, 0].sum(), x, create_graph=True)
        with pytest.raises(UnsupportedError, match="differentiated again.*eval"):
            dx.square().sum().backward()
        layer.eval()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()

    run_ranks(rank_main, 2)


def test_evaluation_sends_nothing() -> None:
    def rank_main(comm):
        for track in (True, False):
            layer = MultiNodeBatchNorm1d(3, comm, track_running_stats=track).double().eval()
            if comm.rank == 0:  # alone
                layer(rows(0))

    run_ranks(rank_main, 2)


def test_ranks_fill_buckets_at_different_times() -> None:
    """One rank does not use a layer whose gradient another one sends before batch norm's sums."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.sometimes = nn.Linear(4, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x, is_used):
            hidden = self.norm(self.first(x))
            return self.last(self.sometimes(hidden) if is_used else hidden)

    def rank_main(comm):
        comm.route.bucket_bytes = 64
        model = convert_batch_norm(Branching().double(), comm)
        comm.bcast_data(model)
        sgd = torch.optim.SGD(model.parameters(), 0.01)
        optimizer = create_multi_node_optimizer(sgd, comm, model)
        for step in range(4):
            optimizer.zero_grad()
            model(rows(comm.rank), (step + comm.rank) % 2).square().sum().backward()
            optimizer.step()
        return model.first.weight.detach()

    first, second = run_ranks(rank_main, 2, name="hierarchical", topology=TWO_NODES)
    assert torch.equal(first, second)


def test_while_gradients_of_an_earlier_step_are_exchanged() -> None:
    def rank_main(comm):
        comm.route.bucket_bytes = 64
        torch_model = convert_batch_norm(network(), comm)
        with torch.no_grad():
            for p in torch_model.parameters():
                p.copy_(torch.arange(p.numel(), dtype=p.dtype).view_as(p) / 10)
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(torch_model.parameters(), 0.01),
            comm,
            torch_model,
            schedule="double_buffering",
        )
        for step in range(5):
            optimizer.zero_grad()
            torch_model(rows(10 * step + comm.rank, comm.rank * 3)).square().sum().backward()
            optimizer.step()
        optimizer.flush()
        return torch_model.state_dict()

    first, second = run_ranks(rank_main, 2, name="hierarchical", topology=TWO_NODES)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
