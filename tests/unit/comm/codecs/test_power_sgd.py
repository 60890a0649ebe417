"""PowerSGD over real communicators, and its parts."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchmn.comm import Communicator
from torchmn.comm.codecs import PowerSGD
from torchmn.comm.codecs.kernels import kernels_for
from torchmn.comm.codecs.power_sgd import orthogonalise_
from torchmn.errors import UsageError
from torchmn.testing import run_ranks

pytestmark = pytest.mark.timeout(300)  # numba compiles once per machine, on one that may be busy

SHAPES = {"conv": (40, 8, 3, 3), "bias": (40,), "dense": (60, 50), "tall": (1500, 2, 1)}
SHAPES |= {"scalar": (), "empty": (0, 7), "small": (10, 10)}  # which are not compressed


def gradients(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a rank has: noise, and a part that all have."""
    noise, common = (torch.Generator().manual_seed(seed) for seed in (rank, 7))
    wide = torch.float64
    return {
        name: sum(torch.randn(shape, generator=g, dtype=wide) for g in (noise, common)).to(dtype)
        for name, shape in SHAPES.items()
    }


def test_a_matrix_of_that_rank_is_exact() -> None:
    def mean(comm: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(comm.rank)
        left = torch.randn(80, 2, generator=generator, dtype=torch.float64)
        right = torch.randn(2, 70, generator=generator, dtype=torch.float64)
        matrix = left @ right
        expected = torch.stack(comm.allgather(matrix)).mean(0)
        PowerSGD(rank=8).mean_([("m", matrix)], comm)
        return matrix - expected

    for off in run_ranks(mean, 3):  # three of rank two make rank six, below eight
        assert off.abs().max() < 1e-10


def test_warm_start_finds_the_largest_singular_vectors() -> None:
    def descend(comm: Communicator) -> list[float]:
        generator = torch.Generator().manual_seed(0)
        u, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
        scales = 0.7 ** torch.arange(60, dtype=torch.float64)
        matrix = (u * scales) @ u.T
        codec, errors = PowerSGD(rank=4), []
        for _ in range(8):
            copy = matrix.clone()
            codec.mean_([("m", copy)], comm)
            codec.finish(is_valid=True)
            for block in codec._residuals._blocks.values():
                block.current.zero_()  # to see the subspace iteration alone
            errors.append(float((copy - matrix).norm()))
        best = float(scales[4:].norm())
        return [error / best for error in errors]

    (errors, _) = run_ranks(descend, 2)
    assert errors[0] > 1.2
    assert errors[-1] < 1.01


def test_zeros_stay_zeros_and_do_not_stop_it_permanently() -> None:
    def train(comm: Communicator) -> list[Tensor]:
        codec, returned = PowerSGD(rank=2), []
        for scale in (0.0, 0.0, 1.0):
            matrix = gradients(comm.rank, torch.float64)["dense"] * scale
            codec.mean_([("dense", matrix)], comm)
            codec.finish(is_valid=True)
            returned.append(matrix)
        return returned

    for first, second, third in run_ranks(train, 2):
        assert not first.any()
        assert not second.any()
        assert third.norm() > 1


def test_tiny_gradients_do_not_vanish() -> None:
    def train(comm: Communicator) -> float:
        codec = PowerSGD(rank=2)
        for _ in range(3):
            matrix = gradients(comm.rank)["dense"] * 1e-25
            codec.mean_([("dense", matrix)], comm)
            codec.finish(is_valid=True)
        return float(matrix.double().norm())

    assert all(norm > 1e-25 for norm in run_ranks(train, 2))


def test_strides_and_sixteen_bits() -> None:
    def mean(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        conv = gradients(comm.rank)["conv"]
        dense = gradients(comm.rank)["dense"]
        pairs = []
        for a, b in (
            (conv, conv.to(memory_format=torch.channels_last)),
            (dense, dense.T.contiguous().T),
            (dense, dense.to(torch.bfloat16)),
        ):
            x, y = a.clone(), b.clone(memory_format=torch.preserve_format)
            PowerSGD(rank=2).mean_([("w", x)], comm)
            PowerSGD(rank=2).mean_([("w", y)], comm)
            assert y.stride() == b.stride()
            pairs.append((x, y))
        return pairs

    for (a, b), (c, d), (e, f) in run_ranks(mean, 2):
        assert torch.allclose(a, b, atol=1e-5)
        assert torch.allclose(c, d, atol=1e-5)
        assert (e - f.float()).norm() < 0.02 * e.norm()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_orthogonalise(n: int, r: int, num_dependent: int) -> None:
    generator = torch.Generator().manual_seed(n * r)
    matrix = torch.randn(n, r, generator=generator)
    for k in range(min(num_dependent, r - 1)):
        matrix[:, k + 1] = matrix[:, 0] * (k + 2)
    columns = matrix.clone()
    orthogonalise_(matrix)
    gram = matrix.T @ matrix
    is_there = gram.diagonal() > 0.5
    assert torch.allclose(gram, torch.diag(is_there.float()), atol=1e-4)
    assert int(is_there.sum()) == int(torch.linalg.matrix_rank(columns.double(), rtol=1e-5))
    torch.testing.assert_close(matrix @ (matrix.T @ columns), columns, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 1), (20, 501, 4)])
def test_outer_sum_adds_rounded_terms_in_order(dtype: torch.dtype, shape: tuple) -> None:
    n, m, r = shape
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(k, r, generator=generator, dtype=dtype) for k in (n, m))
    terms = [p[:, k : k + 1] * q[:, k] for k in range(r)]
    total = torch.empty(n, m, dtype=dtype)
    kernels_for("cpu").outer_sum(p, q, total)
    assert torch.equal(total, sum(terms[1:], terms[0]))
    torch.testing.assert_close(total, p @ q.T)
    rest = torch.ones(n, m, dtype=dtype)
    kernels_for("cpu").subtract_outer_(rest, p, q)
    assert torch.equal(rest, functools.reduce(torch.sub, terms, torch.ones(n, m, dtype=dtype)))
    torch.testing.assert_close(rest, 1 - p @ q.T)


def test_invalid_arguments_and_new_instance() -> None:
    with pytest.raises(UsageError, match="rank=0 must be at least 1"):
        PowerSGD(rank=0)
    codec = PowerSGD(rank=3, seed=2)
    codec.finish(is_valid=True)
    assert repr(codec.new_instance()) == "PowerSGD(rank=3)"
    assert codec.new_instance().state_dict()["step"] == 0


def test_inside_autocast_it_has_the_precision_of_its_tensors() -> None:
    def train(comm: Communicator) -> list[Tensor]:
        sent = []
        for is_enabled in (False, True):
            named = gradients(comm.rank)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
                PowerSGD(rank=2).mean_([*named.items()], comm)
            sent.append(named["dense"])
        return sent

    for outside, inside in run_ranks(train, 2):
        assert torch.equal(outside, inside)
