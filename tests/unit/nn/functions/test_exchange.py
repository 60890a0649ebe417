"""The order of backward: what is connected without delegates, and mistakes with their lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from tests.unit.comm.ranks import one_stays_away
from torchmn.comm import Communicator
from torchmn.errors import CommunicationError, TimeLimitError, UsageError
from torchmn.nn.functions import allgather, allreduce, pseudo_connect, recv, send
from torchmn.testing import run_ranks

HERE = "test_exchange.py"


def line_of(function: Callable[..., object], text: str) -> int:
    """The line of this file, in a function, that has a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if text in line)


def test_a_result_of_send_that_is_never_used_still_gets_its_gradient() -> None:
    def rank_main(comm: Communicator) -> object:
        w = torch.tensor(3.0, requires_grad=True)
        if comm.rank == 0:
            hidden = w * w
            send(hidden, comm, 1)
            (hidden * 5).backward()
        else:
            (recv(comm, 0) * 7 * w).backward()
        return w.grad

    assert run_ranks(rank_main, 2) == [6.0 * (5 + 21), 63.0]


def test_a_collective_whose_result_one_rank_does_not_use_runs_on_all() -> None:
    def rank_main(comm: Communicator) -> object:
        w = torch.tensor(3.0, requires_grad=True)
        hidden = w * w
        gathered = allgather(comm, hidden)
        (hidden + (sum(gathered) if comm.rank == 0 else 0)).backward()
        return w.grad

    assert run_ranks(rank_main, 3) == [12.0, 12.0, 12.0]


def test_what_was_made_of_a_received_tensor_and_sent_must_be_reached() -> None:
    def rank_main(comm: Communicator) -> None:
        if comm.rank == 0:
            x = torch.ones(2, requires_grad=True)
            delegate = send(x * 2, comm, 1)
            (recv(comm, 1, delegate).sum()).backward()
            return
        hidden = recv(comm, 0)
        delegate = send((hidden * 3).sin(), comm, 0)
        (hidden * 5).sum().backward()
        del delegate

    with pytest.raises(UsageError) as caught:
        run_ranks(rank_main, 2)
    text = str(caught.value)
    assert f"recv(rank=0, tag=0) at {HERE}:{line_of(rank_main, 'hidden = recv')}" in text
    assert f"send(rank=0, tag=0) at {HERE}:{line_of(rank_main, 'delegate = send((')}" in text
    assert "loss = pseudo_connect(delegate, loss)" in text


def test_backward_of_a_delegate_that_was_passed_already() -> None:
    def rank_main(comm: Communicator) -> None:
        w = torch.tensor(2.0, requires_grad=True)
        if comm.rank == 0:
            delegate = send(w * w, comm, 1)
            (recv(comm, 1) * w).backward()
            delegate.backward()
        else:
            (send(recv(comm, 0) * w, comm, 0)).backward()

    with pytest.raises(UsageError, match="backward has passed send.* already, through recv") as got:
        run_ranks(rank_main, 2)
    assert f"{HERE}:{line_of(rank_main, 'delegate = send')}" in str(got.value)


def test_a_rank_without_backward_is_named_with_both_lines() -> None:
    def sends(comm: Communicator) -> None:
        send(torch.ones(2, requires_grad=True) * 2, comm, 1)

    def call(comm: Communicator) -> None:
        recv(comm, 0).sum().backward()

    with pytest.raises(CommunicationError) as caught:
        one_stays_away(call, absent=0, before=sends)
    text = str(caught.value)
    assert f"recv(rank=0, tag=0) at {HERE}:{line_of(call, 'recv(comm, 0)')}" in text
    assert f"of send at {HERE}:{line_of(sends, 'send(torch')} in sends on rank 0" in text


def test_hang_reports_know_the_call_of_the_script() -> None:
    def rank_main(comm: Communicator) -> list[str]:
        x = torch.ones(2, requires_grad=True)
        if comm.rank == 0:
            send(x * 2, comm, 1).backward()
        else:
            recv(comm, 0).sum().backward()
        comm.allreduce(x)  # of no function
        return [entry.call for entry in comm.flight_recorder.entries()]

    sender, receiver = run_ranks(rank_main, 2)
    send_at = f"{HERE}:{line_of(rank_main, 'send(x * 2')} in rank_main"
    recv_at = f"{HERE}:{line_of(rank_main, 'recv(comm, 0)')} in rank_main"
    assert (
        f"Backward of recv(rank=0, tag=0) at {recv_at}, of send at {send_at} on rank 0" in receiver
    )
    assert f"send(rank=1, tag=0) at {send_at}" in sender
    assert [calls[-1] for calls in (sender, receiver)] == ["", ""]


def test_a_rank_that_waits_says_what_it_has_not_reached() -> None:
    def receives(comm: Communicator) -> None:
        recv(comm, 0)
        recv(comm, 0)

    def call(comm: Communicator) -> None:
        x = torch.ones(2, requires_grad=True)
        forgotten = send(x * 3, comm, 1)
        send(x * 2, comm, 1).backward()
        del forgotten

    with pytest.raises(TimeLimitError, match="Backward of this rank has not reached: send") as got:
        one_stays_away(call, before=receives)
    assert f"{HERE}:{line_of(call, 'forgotten = send')}" in str(got.value)


def test_tags_that_do_not_match() -> None:
    def sends(comm: Communicator) -> None:
        send(torch.ones(2), comm, 1, tag=4)

    def call(comm: Communicator) -> None:
        recv(comm, 0, tag=5)

    with pytest.raises(TimeLimitError, match="not requested: rank 0 tag 4") as caught:
        one_stays_away(call, absent=0, before=sends)
    text = str(caught.value)
    assert f"recv(rank=0, tag=5) at {HERE}:{line_of(call, 'recv(comm')}" in text
    assert f"{HERE}:{line_of(sends, 'tag=4)')}" in text


def test_shapes_that_do_not_match() -> None:
    def rank_main(comm: Communicator) -> None:
        allreduce(comm, torch.ones(2 + comm.rank, requires_grad=True))

    with pytest.raises(CommunicationError, match=rf"float32\[2\].*float32\[3\].*{HERE}:\d+"):
        run_ranks(rank_main, 2)


def test_no_grad_on_one_rank_only() -> None:
    def rank_main(comm: Communicator) -> None:
        with torch.set_grad_enabled(comm.rank == 0):
            allreduce(comm, torch.ones(2, requires_grad=True))

    with pytest.raises(CommunicationError, match="may record gradients"):
        run_ranks(rank_main, 2)


def test_a_loop_is_not_connected_with_the_one_before() -> None:
    """Rank 1's backward in the second run does not wait for a gradient of the first."""

    def rank_main(comm: Communicator) -> object:
        w = torch.tensor(2.0, requires_grad=True)
        for step in range(3):
            if comm.rank == 0:
                send(w * w, comm, 1)
                y = recv(comm, 1) * w
                if step == 2:
                    y.backward()
            else:
                delegate = send(recv(comm, 0) * w, comm, 0)
                if step == 2:
                    delegate.backward()
        return w.grad

    # w0 * w0 * w1 * w0
    assert run_ranks(rank_main, 2) == [3 * 2 * 2 * 2.0, 2 * 2 * 2.0]


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
