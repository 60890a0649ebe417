"""Two optimizers that share each backward pass: ranks have the parameters of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.unit.exchange import ordinary_loop
from torchmn import create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.testing import run_ranks


def optimizers_of(model: nn.Module, comm: Communicator | None, what: str, *, is_reversed: bool):
    """One for matrices and one for vectors, so that the layers of both are mixed."""
    matrices, vectors = ordinary_loop.split_groups(model)
    inner = [torch.optim.SGD(matrices, 0.1, momentum=0.9), torch.optim.AdamW(vectors, 0.02)]
    if comm is not None:
        comm.route.bucket_bytes = 200  # so that each has several
        options = {
            "samples": {"weight": "samples"},
            "view": {"gradient_as_bucket_view": True},
        }.get(what, {})
        inner = [create_multi_node_optimizer(each, comm, model, **options) for each in inner]
    return inner[::-1] if is_reversed else inner


def train(
    comm: Communicator | None = None, *, num_ranks: int, what: str, is_reversed: bool
) -> list[Tensor]:
    """Train on this rank's rows, or on all; ``is_reversed``: the optimizers step in that order."""
    model = ordinary_loop.model_of_layers()
    return ordinary_loop.train(
        comm,
        num_ranks,
        model,
        optimizers_of(model, comm, what, is_reversed=is_reversed),
        what,
        num_steps=6,
        overflow=3,
        reloads=(2,),
        is_frozen=lambda step: step % 3 == 1,
    )


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "what",
    ["plain", "clip", "scaler", "ema", "compile", "samples", "view", "rates", "reload", "freeze"],
)
def test_as_one_process(what: str, num_ranks: int, is_reversed: bool) -> None:
    run = partial(train, num_ranks=num_ranks, what=what, is_reversed=is_reversed)
    expected = run()
    for result in run_ranks(run, num_ranks):
        for here, there in zip(result, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)
