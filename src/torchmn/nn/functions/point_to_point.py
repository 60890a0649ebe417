"""Differentiable messages between two ranks: the receiver's backward sends the gradient back.

A message carries which of its tensors require a gradient, a number, and the sender's line of
source. Gradients travel in a channel of their own under the number of the message that they
answer, so neither messages of `Communicator.send` nor other gradients are taken for them, and a
gradient that does not come is reported with the lines of both ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.comm.collectives import unread_messages
from torchmn.comm.reductions import dense
from torchmn.nn.functions.exchange import Exchange, Gradients, Like, order_of, use_delegate
from torchmn.nn.functions.recomputation import checkpoints, has_gradients
from torchmn.nn.micro_batches import placed

_MARK = "functions.send"


@not_compiled
def send(x: Tensor | Sequence[Tensor], comm: Communicator, rank: int, tag: int = 0) -> Tensor:
    """Send a tensor, or a tuple or list of tensors; backward receives their gradients.

    Called by the sender only; the receiver calls `recv`. Shapes and dtypes are free. It may block
    until the receiver receives. What requires a gradient here is answered with one: send
    ``x.detach()`` where only the values are of interest.

    Returns:
        The delegate variable: a zero of shape (), which stands for what the other rank makes of
        ``x``. Backward must reach it: pass it to `recv` or `pseudo_connect`, add it to the loss, or
        call its ``backward()`` on a rank that has no loss.

    Raises:
        UsageError: ``x`` has something else than dense tensors, ``rank`` is not another rank, or
            ``tag`` is out of range.
        CommunicationError: the receiver does not receive, or, in backward, returns no gradient
            within the time limit.

    Example:
        >>> def train(comm):  # a model in two halves
        ...     if comm.rank == 0:
        ...         weight = torch.ones(2, requires_grad=True)
        ...         torchmn.functions.send(weight * 2, comm, rank=1).backward()
        ...         return weight.grad.tolist()
        ...     torchmn.functions.recv(comm, rank=0).sum().backward()
        >>> torchmn.testing.run_ranks(train, 2)
        [[2.0, 2.0], None]
    """
    is_tuple = isinstance(x, (list, tuple))
    xs = tuple(cast("Sequence[Tensor]", x)) if is_tuple else (cast(Tensor, x),)
    sent = tuple(dense("send", each) for each in xs)
    around = checkpoints()
    message = _Message(comm, rank)
    exchange = Exchange(comm, f"send(rank={rank}, tag={tag})", message.recv_gradient)
    exchange.is_delegate = True

    def send_once() -> tuple[tuple[Tensor, ...], Any]:
        # The sender decides which tensors have gradients: the receiver learns it by the flags.
        flags = [around.records(each) for each in xs]
        if any(flags):
            message.number = comm.replies.new_number(rank)
        content = (_MARK, message.number, exchange.line, flags, is_tuple, sent)
        comm.send_obj(content, rank, tag)
        return (), (message.number, flags)

    with exchange.named():
        _, (message.number, flags) = around.once(send_once)
    first = next((each for each in sent if has_gradients(each)), torch.empty(0, device="cpu"))
    delegate = first.new_zeros(())
    if not torch.is_grad_enabled() or not any(flags):
        return delegate
    order_of(comm).expect(exchange, rank, message.number)
    differentiable = [each for each, flag in zip(xs, flags, strict=True) if flag]
    return exchange.recorded([delegate], differentiable, is_in_program=around.is_in_program)[0]


@not_compiled
def recv(
    comm: Communicator,
    rank: int,
    delegate_variable: Tensor | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """Receive what another rank has sent by `send`; backward sends the gradient to it.

    Called by the receiver only. It blocks until the message has arrived. What requires a gradient
    at the sender does here. Tensors of `Communicator.send` are received too, without gradients.

    Args:
        comm: the communicator of both ranks.
        rank: the sender.
        delegate_variable: a delegate of this rank, through which backward continues after the
            gradient has been sent.
        tag: the tag it was sent with.
        force_tuple: return a tuple for a single tensor as well.

    Returns:
        A tensor, or a tuple if the sender sent several.

    Raises:
        UsageError: there is no such rank or tag, or the message is an object of `send_obj`.
        CommunicationError: no message arrives, or, in backward, the sender does not receive the
            gradient within the time limit.

    Example:
        >>> def exchange(comm):
        ...     if comm.rank == 0:
        ...         torchmn.functions.send(torch.ones(2), comm, rank=1)
        ...     else:
        ...         return torchmn.functions.recv(comm, rank=0).tolist()
        >>> torchmn.testing.run_ranks(exchange, 2)
        [None, [1.0, 1.0]]
    """
    around = checkpoints()
    message = _Message(comm, rank)
    exchange = Exchange(comm, f"recv(rank={rank}, tag={tag})", message.send_gradient)

    def receive_once() -> tuple[tuple[Tensor, ...], Any]:
        got = comm.recv_obj(rank, tag)
        if _is_ours(got):
            _, number, line, flags, is_tuple, values = got
            return values, (number, line, flags, is_tuple)
        values = got if isinstance(got, tuple) else (got,)
        if not all(isinstance(value, Tensor) for value in values):
            raise UsageError(
                f"{exchange.title} got a {type(got).__name__} and not a tensor. Use "
                "Communicator.recv_obj for objects."
            )
        return values, (0, "", [False] * len(values), isinstance(got, tuple))

    with exchange.named(other_rank=lambda: _unread(comm)):
        values, (message.number, line, flags, is_tuple) = around.once(receive_once)
    if torch.is_grad_enabled() and any(flags):
        use_delegate(delegate_variable)
        exchange.title += f", of send at {line} on rank {rank}"
        message.line = exchange.line
        chosen = [value for value, flag in zip(values, flags, strict=True) if flag]
        recorded = exchange.recorded(
            chosen, delegate=delegate_variable, is_in_program=around.is_in_program
        )
        values = placed(recorded, flags, values)
    elif delegate_variable is not None and any(has_gradients(value) for value in values):
        connected = pseudo_connect(delegate_variable, *values)
        values = connected if isinstance(connected, tuple) else (connected,)
    return values if is_tuple or force_tuple else values[0]


@not_compiled
def pseudo_connect(delegate_variable: Tensor | None, *actual_variables: Tensor) -> Any:
    """The actual variables, through which backward reaches the delegate variable as well. Local.

    Returns the variables unchanged: one tensor, or a tuple of several. ``delegate_variable=None``
    connects nothing. Raises UsageError: no variable is given.

    Example:
        >>> torchmn.functions.pseudo_connect(None, torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    if not actual_variables:
        raise UsageError("pseudo_connect needs a variable, which the result is.")
    use_delegate(delegate_variable)
    outputs = actual_variables
    if delegate_variable is not None and delegate_variable.requires_grad:
        outputs = _Connect.apply(delegate_variable, *actual_variables)  # type: ignore[no-untyped-call]
    return outputs if len(outputs) > 1 else outputs[0]


@dataclass
class _Message:
    """The other rank of a message, and the number under which backward answers it."""

    comm: Communicator
    peer: int
    number: int = 0
    """Counts the messages with gradients from one rank to the other, from 1; 0 if it has none."""
    line: str = ""
    """The line of the script that received it."""

    def send_gradient(self, grads: list[Tensor | None]) -> tuple[Gradients, Tensor | None]:
        """Answer with gradients; return a delegate if these require gradients themselves."""
        flags = [g is not None and torch.is_grad_enabled() and g.requires_grad for g in grads]
        answer = _Message(self.comm, self.peer)
        if any(flags):
            answer.number = self.comm.replies.new_number(self.peer)
        values = tuple(None if g is None else g.detach() for g in grads)
        content = (self.line, answer.number, flags, values)
        self.comm.replies.send(content, self.peer, self.number)
        if not any(flags):
            return (), None
        exchange = Exchange(self.comm, f"gradient to rank {self.peer}", answer.recv_gradient)
        exchange.is_delegate = True
        # In a second backward this gradient is a message itself, whose gradient comes back here.
        order_of(self.comm).expect(exchange, self.peer, answer.number)
        sent = [g for g, flag in zip(grads, flags, strict=True) if flag and g is not None]
        return (), exchange.recorded([sent[0].new_zeros(())], sent, is_in_program=False)[0]

    def recv_gradient(self, grads: list[Tensor | None]) -> tuple[Gradients, Tensor | None]:
        """Wait for the gradients of what was sent, None where there is none."""
        answer = _Message(self.comm, self.peer)
        _, answer.number, flags, values = self.comm.replies.recv(self.peer, self.number)
        order_of(self.comm).raise_if_lost(self.comm)
        if not torch.is_grad_enabled() or not any(flags):
            return values, None
        exchange = Exchange(self.comm, f"gradient of rank {self.peer}", answer.send_gradient)
        chosen = [value for value, flag in zip(values, flags, strict=True) if flag]
        recorded = exchange.recorded(chosen, delegate=grads[0], is_in_program=False)
        return placed(recorded, flags, values), None


def _unread(comm: Communicator) -> str:
    """Text for errors: the lines that sent messages which have arrived but were not received."""
    lines = [
        f" Rank {source} sent tag {tag} at {content[2]}."
        for source, tag, content in unread_messages(comm)
        if _is_ours(content)
    ]
    return "".join(lines[:4])


def _is_ours(content: Any) -> bool:
    return isinstance(content, tuple) and len(content) == 6 and content[0] == _MARK


class _Connect(torch.autograd.Function):
    """The identity of some variables, whose node also leads to a delegate."""

    @staticmethod
    def forward(ctx: Any, delegate: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.delegate = Like(delegate)
        ctx.set_materialize_grads(False)
        outputs = tuple(x.view_as(x) for x in xs)
        ctx.mark_non_differentiable(*(y for y in outputs if not has_gradients(y)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.delegate.zeros(), *grads
