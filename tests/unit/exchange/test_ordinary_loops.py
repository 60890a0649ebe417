"""Two optimizers that share each backward pass, and small first buckets: as one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.exchange import ordinary_loop
from torchmn.comm import Communicator

COMBINED_WITH = ["clip", "scaler", "ema", "compile", "samples", "view", "reload", "freeze"]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("what", ["plain", "rates", *COMBINED_WITH])
def test_two_optimizers(what: str, num_ranks: int, is_reversed: bool) -> None:
    """One for matrices and one for vectors, so that the layers of both are mixed."""

    def train(comm: Communicator | None) -> list[Tensor]:
        if comm is not None:
            comm.route.bucket_bytes = 200  # so that each has several
        model = ordinary_loop.model_of_layers()
        matrices, vectors = ordinary_loop.split_groups(model)
        inner = [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(vectors, 0.02)]
        optimizers = ordinary_loop.create(comm, model, inner, what)
        in_order = optimizers[::-1] if is_reversed else optimizers
        return ordinary_loop.train(comm, num_ranks, model, in_order, what)

    ordinary_loop.check_as_one_process(train, num_ranks, tolerance=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("what", ["two", *COMBINED_WITH])
def test_small_first_buckets(what: str, num_ranks: int) -> None:
    def train(comm: Communicator | None) -> list[Tensor]:
        model = ordinary_loop.model_of_layers(width=200, num_hidden=3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.1)  # sums of 200 products would make rounding grow in each layer
        groups = ordinary_loop.split_groups(model) if what == "two" else [[*model.parameters()]]
        inner = [torch.optim.SGD(group, 0.05, momentum=0.9) for group in groups]
        optimizers = ordinary_loop.create(comm, model, inner, what)
        if comm is not None:
            num_buckets = len(optimizers[0].reducer.exchange.filling.buckets)
            assert num_buckets == {2: 3, 3: 2}[num_ranks]
        return ordinary_loop.train(comm, num_ranks, model, optimizers, what)

    # Within one host buckets are not cut so.
    ordinary_loop.check_as_one_process(train, num_ranks, name="hierarchical")
