import pytest
import torch
from torch import nn

from torchmn.comm import Communicator
from torchmn.errors import RankMismatchError, UnknownNameError
from torchmn.testing import run_ranks
from torchmn.train.evaluation import sync_buffers_


def model_of(rank: int) -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    for index, buffer in enumerate(model.buffers()):
        buffer.fill_(10 * index + rank)
    model.register_buffer("flag", torch.tensor(rank == 0))
    model.register_buffer("phase", torch.tensor(complex(rank, -rank)))
    model.register_buffer("narrow", torch.full((2,), float(rank), dtype=torch.float16))
    return model


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_average_floats_and_take_the_rest_from_rank_0(size: int) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = model_of(comm.rank)
        sync_buffers_([model], comm)
        return dict(model.named_buffers())

    mean = sum(range(size)) / size
    for buffers in run_ranks(body, size):
        assert buffers["0.running_mean"].tolist() == [pytest.approx(mean)] * 3
        assert buffers["1.running_var"].tolist() == [pytest.approx(40 + mean)] * 2
        assert buffers["1.num_batches_tracked"] == 50
        assert buffers["flag"]
        assert complex(buffers["phase"]) == pytest.approx(complex(mean, -mean))
        assert buffers["narrow"].dtype == torch.float16
        assert buffers["narrow"].tolist() == [pytest.approx(mean, rel=1e-3)] * 2


def test_all_from_rank_0() -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        model = model_of(comm.rank)
        sync_buffers_([model], comm, "rank0")
        return list(model.buffers())

    for buffers in run_ranks(body, 3):
        for buffer, expected in zip(buffers, model_of(0).buffers(), strict=True):
            assert torch.equal(buffer, expected)


def test_caches_stay_each_rank_s_own() -> None:
    """They may have other shapes, by the lengths that a rank has seen."""

    def body(comm: Communicator) -> list[int]:
        model = model_of(comm.rank)
        model.register_buffer("cache", torch.full((comm.rank + 1,), 7.0), persistent=False)
        model.register_buffer("none", None)
        sync_buffers_([model], comm)
        return model.cache.tolist()  # type: ignore[operator, union-attr]

    assert run_ranks(body, 2) == [[7.0], [7.0, 7.0]]


def test_equal_buffers_keep_their_bits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))

    def body(comm: Communicator) -> torch.Tensor:
        model = nn.Module()
        model.register_buffer("statistics", values.clone())
        sync_buffers_([model, model], comm)
        return model.statistics  # type: ignore[return-value]

    assert all(torch.equal(after, values) for after in run_ranks(body, 3))


def test_local_is_no_collective() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            sync_buffers_([model_of(0)], comm, "local")

    run_ranks(body, 2)


def test_unknown_rule() -> None:
    with pytest.raises(UnknownNameError, match="average, rank0, local"):
        run_ranks(lambda comm: sync_buffers_([], comm, "sum"), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["average", "rank0"])
def test_different_models_are_refused(rule: str) -> None:
    def body(comm: Communicator) -> None:
        model = nn.BatchNorm1d(3 + comm.rank)
        sync_buffers_([model], comm, rule)  # type: ignore[arg-type]

    with pytest.raises(RankMismatchError):
        run_ranks(body, 2)
