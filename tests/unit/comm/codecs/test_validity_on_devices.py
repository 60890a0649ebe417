"""`finish` with a tensor, which the host does not look at, does what it does with a bool."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from torchmn.comm.allreduce import ReduceBlock
from torchmn.comm.codecs import BFloat16, ErrorFeedback, Layout, PowerSGD, Quantized
from torchmn.comm.streams import HostStreams
from torchmn.testing import run_ranks

LAYOUT = Layout.of([("w", 0, (64, 32)), ("b", 2048, (40,))], torch.float32)
CODECS = {
    "int8": lambda: ErrorFeedback(Quantized(8)),
    "1bit": lambda: ErrorFeedback(Quantized(1)),
    "bfloat16": lambda: ErrorFeedback(BFloat16()),
    "power_sgd": lambda: PowerSGD(2),
}


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def rank_main(comm, name: str, as_validity):
    codec = CODECS[name]()
    algorithm = comm.route.allreduce_algorithm(codec)
    generator = torch.Generator().manual_seed(comm.rank)
    states = []
    for is_valid in (True, False, True):
        codec.begin(1.0)
        block = ReduceBlock(torch.randn(LAYOUT.end, generator=generator), LAYOUT)
        end = partial(codec.finish, is_valid=as_validity(is_valid))
        comm.engine.call(comm.route.sum_job(block, algorithm, on_complete=end))
        states.append(copy.deepcopy(codec.state_dict()))
    return states


@pytest.mark.parametrize("name", CODECS)
def test_residuals_are_the_same(name: str) -> None:
    by_host = run_ranks(lambda comm: rank_main(comm, name, bool), 2)
    by_device = run_ranks(lambda comm: rank_main(comm, name, torch.tensor), 2)
    for host, device in zip(by_host, by_device, strict=True):
        for ours, theirs in zip(host, device, strict=True):
            assert equal(ours.get("residuals"), theirs.get("residuals"))
            assert equal(ours.get("q"), theirs.get("q"))
        assert not equal(host[0], host[2])


def test_what_was_found_is_taken_before_the_next_exchange() -> None:
    codec = Quantized(8)
    encoded = torch.zeros(codec.stripe_nbytes(LAYOUT), dtype=torch.uint8)
    values = torch.ones(LAYOUT.end)
    values[5] = float("nan")
    codec.encode_stripe(values, LAYOUT, encoded)
    assert codec.nonfinite.is_clear("encoding") is False
    assert codec.nonfinite.is_clear("decoding") is True
    found = codec.nonfinite.take(HostStreams().fetch)
    codec.finish(is_valid=False)
    codec.encode_stripe(torch.ones(LAYOUT.end), LAYOUT, encoded)
    assert found.names("encoding") == ["w"]
    assert codec.nonfinite.names("encoding") == []
