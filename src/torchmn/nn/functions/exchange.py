"""One exchange of a graph: its node of autograd, and the order in which backward runs the nodes.

Forward makes exchanges in an order that fits on all ranks. Backward fits if every rank runs the
same exchanges in exactly the reverse order. Autograd runs the nodes that it reaches newest first,
so what is left is that it reaches all of them:

* A delegate, the result of `send`, leads to its exchange. Functions that follow in the same run of
  the function that called it take the delegates that no call has used as hidden inputs.
* Where backward passes through a tensor that was sent, but not through the exchange, the exchange
  runs there and adds its gradient.
* Where what was received is used, but what was made of it and sent is not reached, its gradient
  would be incomplete: backward raises.

A delegate that nothing can use any more is released with the next exchange, so that graphs without
a backward pass are not kept alive.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.base.script_line import script_line
from torchmn.base.torch_private import current_graph_task_id, keeps_graph, will_execute_node
from torchmn.comm import Communicator
from torchmn.nn.functions.recomputation import (
    Position,
    backward_functions,
    has_gradients,
    is_before,
    position,
)

Gradients = Sequence[Tensor | None]
Backward = Callable[[list[Tensor | None]], tuple[Gradients, Tensor | None]]
"""Maps gradients of results to those of inputs, and to a delegate of what was sent for them."""

_MAX_NAMED = 4
_numbers = itertools.count()


class Exchange:
    """A call that exchanges tensors; backward exchanges their gradients. Keeps no graph alive."""

    def __init__(
        self,
        comm: Communicator,
        title: str,
        backward: Backward,
        *,
        needs_all_gradients: bool = False,
    ) -> None:
        self.comm = comm
        self.line = script_line()
        self.title = f"{title} at {self.line}"
        self.is_delegate = False
        """Whether the only result is a delegate: other ranks decide about the gradient."""
        self._backward = backward
        self._needs_all_gradients = needs_all_gradients
        order_of(comm).note_call(comm)
        self._number = next(_numbers)
        self._pass_id = -1
        self._may_run_again = True
        self.taken_by: tuple[weakref.ref[Exchange], str] | None = None
        """The exchange that has its delegate as a hidden input, and the title of that exchange."""
        self.node_reference: weakref.ref[Any] | None = None
        self._results: list[Like] = []

    def recorded(
        self,
        results: Sequence[Tensor],
        inputs: Sequence[Tensor] = (),
        delegate: Tensor | None = None,
        *,
        is_in_program: bool = True,
    ) -> tuple[Tensor, ...]:
        """Record the exchange in the graph; return the results with its node.

        Backward goes from there to the inputs and the delegate. ``is_in_program=False``: the
        exchange neither takes nor keeps delegates of other calls.
        """
        order = order_of(self.comm)
        hidden = [] if delegate is None or not delegate.requires_grad else [delegate]
        if is_in_program and not self.is_delegate:
            hidden += order.take_pending(self)
        # autograd makes a node only if an input requires a gradient, and `recv` may have no input.
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        self._results = [Like(result) for result in results]
        found = _Node.apply(self, list(results), len(inputs), anchor, *inputs, *hidden)  # type: ignore[no-untyped-call]
        recorded: tuple[Tensor, ...] = tuple(found)
        if is_in_program:
            if self.is_delegate:
                order.add(self, recorded[0])
            # Backward may pass through the input without reaching the node: see the module.
            if len(inputs) == 1 and inputs[0].grad_fn is not None:
                inputs[0].register_hook(self._add_gradient)
        return recorded

    @contextmanager
    def named(self, doing: str = "", other_rank: Callable[[], str] = str) -> Iterator[None]:
        """Name the call, its line and, if known, the other rank's in errors and hang reports."""
        recorder, call = self.comm.flight_recorder, f"{doing}{self.title}"
        before, recorder.call = recorder.call, call
        try:
            yield
        except CommunicationError as error:
            rest = other_rank() + order_of(self.comm).not_reached(self)
            raise type(error)(f"{error} {call}.{rest}") from error
        finally:
            recorder.call = before

    def run(self, grads: Gradients) -> tuple[Gradients, Tensor | None]:
        """Exchange the gradients, in a backward pass."""
        pass_id = current_graph_task_id()
        order = order_of(self.comm)
        # Errors are found before anything is sent, so that no rank gets half of an exchange.
        self._raise_if_repeated(pass_id)
        order.raise_if_incomplete(self, pass_id)
        order.has_run_backward = True
        self._pass_id = pass_id
        self._may_run_again = keeps_graph()
        order.forget(self)
        with self.named("Backward of "):
            return self._backward(self._filled(grads))

    def _filled(self, grads: Gradients) -> list[Tensor | None]:
        """The gradients of the results; with zeros where there is none, if all are needed."""
        if not self._needs_all_gradients:
            return list(grads)
        return [
            like.zeros() if grad is None else grad
            for like, grad in zip(self._results, grads, strict=True)
        ]

    def has_run_in(self, pass_id: int) -> bool:
        """Whether its gradients were exchanged in this backward pass."""
        return self._pass_id == pass_id

    def follows(self, other: Exchange) -> bool:
        """Whether forward made it after ``other``."""
        return self._number > other._number

    @property
    def node(self) -> Any:
        """Its node; None after the graph has been released."""
        return None if self.node_reference is None else self.node_reference()

    def _raise_if_repeated(self, pass_id: int) -> None:
        """Raise UsageError if an earlier pass has run it and this one cannot do so again.

        That is the case if the earlier pass did not keep the graph, or if this pass does not reach
        the exchange that has taken its delegate.
        """
        if self._pass_id in (-1, pass_id):
            return
        follower, title = (None, "") if self.taken_by is None else self.taken_by
        taken_by = None if follower is None else follower()
        is_alone = bool(title) and (taken_by is None or not taken_by.has_run_in(pass_id))
        if is_alone or not self._may_run_again:
            through = f", through {title}, which follows it" if title else ""
            raise UsageError(
                f"{self.comm.rank_label}: backward has passed {self.title} already{through}. "
                "Call backward() once for both, or with retain_graph=True on all ranks."
            )

    def _add_gradient(self, grad: Tensor) -> Tensor | None:
        """Complete the gradient of the input; a hook, called when backward reaches the input."""
        pass_id = current_graph_task_id()
        if self.has_run_in(pass_id):
            return None
        node = self.node
        if node is not None and keeps_graph():
            return None  # a second pass may begin at its result
        (added,), _ = self.run([None] * len(self._results))
        return None if added is None else grad + added


backward_functions.add(Exchange.run.__code__)


class _Node(torch.autograd.Function):
    """The node of an exchange in the graph; its results have been received before."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        results: list[Tensor],
        num_inputs: int,
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.hidden = [Like(delegate) for delegate in inputs[num_inputs:]]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results if not has_gradients(x)))
        exchange.node_reference = weakref.ref(ctx)  # ctx is the node, and refers to the exchange
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        input_grads, delegate = ctx.exchange.run(grads)
        hidden = [like.zeros(delegate) for like in ctx.hidden]
        return None, None, None, None, *input_grads, *hidden


class Order:
    """The exchanges of one communicator that wait for their backward. Local to a rank."""

    def __init__(self) -> None:
        self._pending: list[tuple[Position, Exchange, Tensor]] = []
        self._sent: list[weakref.ref[Exchange]] = []
        self._num_sent_when_pruned = 0
        self._num_steps = 0
        self.has_run_backward = False
        """Whether backward has run since the last call in forward."""
        self._answered: weakref.WeakValueDictionary[tuple[int, int], Exchange] = (
            weakref.WeakValueDictionary()
        )

    def note_call(self, comm: Communicator) -> None:
        """Count steps: the time limit is shorter after the first one."""
        if current_graph_task_id() == -1:
            self._num_steps += self.has_run_backward
            self.has_run_backward = False
            comm.flight_recorder.set_label(None, self._num_steps)

    def expect(self, exchange: Exchange, peer: int, number: int) -> None:
        """Note that rank ``peer`` will send gradients of an exchange under ``number``."""
        self._answered[peer, number] = exchange

    def raise_if_lost(self, comm: Communicator) -> None:
        """Raise RankMismatchError: a gradient has arrived for a graph that has been released."""
        for peer, number, answer in comm.replies.unread():
            if (peer, number) not in self._answered:
                raise RankMismatchError(
                    f"{comm.rank_label}: rank {peer} has sent the gradient of recv at {answer[0]}, "
                    "but backward of this rank has left out what it had sent there. Make the "
                    "delegate part of the loss: loss = pseudo_connect(delegate, loss)."
                )

    def take_pending(self, follower: Exchange) -> list[Tensor]:
        """Take the unused delegates of calls that precede this place in the program."""
        self._release(position())
        taken, self._pending = self._pending, []
        for _, exchange, _ in taken:
            exchange.taken_by = weakref.ref(follower), follower.title
        return [delegate for _, _, delegate in taken]

    def add(self, exchange: Exchange, delegate: Tensor) -> None:
        """Keep the delegate of an exchange until a call uses it."""
        here = position()
        self._release(here)
        self._pending.append((here, exchange, delegate))
        self._sent.append(weakref.ref(exchange))
        if len(self._sent) > 2 * self._num_sent_when_pruned + 16:
            self._sent = [sent for sent in self._sent if sent() is not None]
            self._num_sent_when_pruned = len(self._sent)

    def forget(self, exchange: Exchange) -> None:
        """Drop the delegate of an exchange: a call has used it, or its backward runs."""
        self._pending = [entry for entry in self._pending if entry[1] is not exchange]

    def raise_if_incomplete(self, exchange: Exchange, pass_id: int) -> None:
        """Raise UsageError if the pass does not reach what was computed from results and sent."""
        own_node = exchange.node
        for later in self._alive():
            if own_node is None or not later.follows(exchange):
                return
            node = later.node
            if node is None or later.has_run_in(pass_id):
                continue
            if not will_execute_node(node) and _leads_to(node, own_node):
                raise UsageError(
                    f"{later.comm.rank_label}: backward reaches {exchange.title}, but not "
                    f"{later.title}, which depends on it, so its gradient would be incomplete. "
                    "Make the delegate part of the loss: loss = pseudo_connect(delegate, loss). "
                    "Where the other rank needs no gradient, send x.detach()."
                )

    def not_reached(self, exchange: Exchange) -> str:
        """Text for errors: the sends of this rank that backward has not reached."""
        titles = [e.title for e in self._alive() if e is not exchange and e.has_run_in(-1)]
        named = ", ".join(list(dict.fromkeys(titles))[:_MAX_NAMED])
        return f" Backward of this rank has not reached: {named}." if named else ""

    def _alive(self) -> Iterator[Exchange]:
        """The exchanges that have sent something and still exist, newest first."""
        for reference in reversed(self._sent):
            exchange = reference()
            if exchange is not None:
                yield exchange

    def _release(self, here: Position) -> None:
        """Release delegates of later places: the program has come back in a loop."""
        self._pending = [entry for entry in self._pending if is_before(entry[0], here)]


def order_of(comm: Communicator) -> Order:
    """The `Order` of a communicator, kept as its attribute. Local."""
    order: Order = vars(comm).setdefault("_function_order", Order())
    return order


def use_delegate(delegate: Tensor | None) -> None:
    """Note that a call connects this delegate, so that later calls need not. Local."""
    exchange = getattr(getattr(delegate, "grad_fn", None), "exchange", None)
    if isinstance(exchange, Exchange):
        order_of(exchange.comm).forget(exchange)


def _leads_to(node: Any, target: Any) -> bool:
    """Whether backward gets from one node to another."""
    seen, waiting = {node}, [node]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is target:
                return True
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


class Like:
    """Shape, dtype and device of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device

    def zeros(self, delegate: Tensor | None = None) -> Tensor:
        """Zeros, through which a second backward reaches ``delegate``."""
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        return (zero if delegate is None else zero + delegate.to(zero)).expand(self._shape)
