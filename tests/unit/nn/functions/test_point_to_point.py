"""send, recv and pseudo_connect: values, gradients, delegates, errors with both ranks' lines."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.limits import limit
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError, UsageError
from torchmn.nn.functions import pseudo_connect, recv, send
from torchmn.testing import run_ranks


def test_a_model_on_two_ranks_has_the_gradients_of_one() -> None:
    first, second = (torch.arange(3.0 * n).view(3, n).double().sin() for n in (4, 2))
    x = torch.ones(5, 3, dtype=torch.float64)

    def rank_main(comm: Communicator) -> torch.Tensor:
        weight = (first if comm.rank == 0 else second.new_ones(4, 2)).clone().requires_grad_()
        if comm.rank == 0:
            send((x @ weight).tanh(), comm, 1).backward()
        else:
            (recv(comm, 0) @ weight).square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = [first.clone().requires_grad_(), second.new_ones(4, 2).requires_grad_()]
    ((x @ expected[0]).tanh() @ expected[1]).square().sum().backward()
    for got, want in zip(run_ranks(rank_main, 2), expected, strict=True):
        torch.testing.assert_close(got, want.grad, rtol=1e-12, atol=1e-12)


def test_tuples_keep_which_of_them_require_a_gradient() -> None:
    def rank_main(comm: Communicator) -> object:
        if comm.rank == 0:
            a = torch.tensor([1.0, 2.0], requires_grad=True)
            labels, unused = torch.tensor([3]), torch.zeros(0, requires_grad=True)
            send((a, labels, unused), comm, 1, tag=7).backward()
            assert a.grad is not None
            return a.grad.tolist(), unused.grad
        a, labels, unused = recv(comm, 0, tag=7)
        (a * a * labels).sum().backward()
        return a.requires_grad, labels.requires_grad, unused.shape

    assert run_ranks(rank_main, 2) == [([6.0, 12.0], None), (True, False, torch.Size([0]))]


def test_a_single_tensor_may_be_a_tuple() -> None:
    def rank_main(comm: Communicator) -> object:
        if comm.rank == 0:
            send(torch.ones(2), comm, 1)
            send([torch.ones(2)], comm, 1)
            return None
        return type(recv(comm, 0, force_tuple=True)), type(recv(comm, 0))

    assert run_ranks(rank_main, 2)[1] == (tuple, tuple)


def test_backward_continues_through_the_delegate() -> None:
    def rank_main(comm: Communicator) -> object:
        w = torch.tensor(2.0, requires_grad=True)
        if comm.rank == 1:
            send(recv(comm, 0) * w, comm, 0).backward()
        else:
            y = recv(comm, 1, delegate_variable=send(w * w, comm, 1))
            (3 * y).backward()
        return w.grad

    assert run_ranks(rank_main, 2) == [3 * 2 * 2 * 2.0, 3 * 4.0]


def test_pseudo_connect_is_the_identity_with_an_edge() -> None:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    delegate = torch.zeros((), requires_grad=True)
    index = torch.tensor([5])
    connected, same = pseudo_connect(delegate, a * 1, index)
    connected.sum().backward()
    assert same.equal(index)
    assert a.grad is not None
    assert delegate.grad == 0
    assert pseudo_connect(None, a) is a
    with pytest.raises(UsageError, match="needs a variable"):
        pseudo_connect(delegate)


def test_a_gradient_that_does_not_come_names_the_lines() -> None:
    has_raised = threading.Event()

    def rank_main(comm: Communicator) -> None:
        if comm.rank == 1:
            recv(comm, 0)
            has_raised.wait(limit(20))
            return
        try:
            send(torch.ones(2, requires_grad=True), comm, 1).backward()
        finally:
            has_raised.set()

    with pytest.raises(CommunicationError, match="test_point_to_point.py:") as caught:
        run_ranks(rank_main, 2, timeout_s=1)
    assert "Backward of send(rank=1, tag=0)" in str(caught.value)
