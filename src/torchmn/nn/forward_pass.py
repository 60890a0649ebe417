"""A plain forward pass of a chain, and the order of the backward pass after it.

Backward communicates inside of autograd, whose order differs between ranks. So on each rank a
scalar runs through all that was sent and received, in the order of the forward pass: autograd must
go back along it, and each rank communicates in the reverse of an order that has completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.comm import Communicator
from torchmn.nn.chain_graph import BACKWARD, FORWARD, Action, ChainGraph, Link
from torchmn.nn.differentiable_once import differentiable_once
from torchmn.nn.functions import pseudo_connect
from torchmn.nn.messages import Messages, Place, Samples
from torchmn.nn.micro_batches import tensors_of, with_tensors
from torchmn.nn.pipeline import explained

_WHOLE = Samples(1, 1)
_TWICE = (
    "A gradient that has arrived from another link of a chain was differentiated again, which "
    "chains cannot do. Write the exchange with torchmn.functions.send and recv, which can."
)


class ForwardPass:
    """One call of ``chain(...)`` on this rank."""

    def __init__(
        self,
        comm: Communicator,
        graph: ChainGraph,
        modules: Sequence[nn.Module],
        messages: Messages,
        order: Sequence[Action],
    ) -> None:
        self._comm = comm
        self._graph = graph
        self._modules = modules
        self._messages = messages
        self._order = order
        self._call = messages.new_call()
        self._local: dict[int, Any] = {}
        self._thread = torch.zeros((), device="cpu", requires_grad=torch.is_grad_enabled())

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """The output where there is one, else the scalar, from which backward can begin."""
        result: Any = None
        has_output = False
        for action in self._order:
            link = action.link
            arguments = self._arguments(link, inputs)
            with explained(self._comm, self._graph, link, arguments):
                output = self._modules[link.index](*arguments)
            for edge in self._graph.outgoing.get(link.key, []):
                if edge.is_local:
                    self._local[edge.number] = output
                else:
                    self._send(Place(FORWARD, edge, 0, self._call), output)
            if link.outputs is None:
                result, has_output = output, True
        self._messages.finish_sends()
        return self._connected(result) if has_output else self._thread

    def _arguments(self, link: Link, inputs: tuple[Any, ...]) -> Sequence[Any]:
        if link.inputs is None:
            return inputs
        return [
            self._local.pop(edge.number)
            if edge.is_local
            else self._receive(Place(FORWARD, edge, 0, self._call))
            for edge in self._graph.incoming[link.key]
        ]

    def _send(self, place: Place, output: Any) -> None:
        tensors = list(tensors_of(output))
        flags = [tensor.requires_grad for tensor in tensors]
        self._messages.send(place, (output, flags), _WHOLE)
        if any(flags):
            trained = [t for t in tensors if t.requires_grad]
            self._thread = _Sent.apply(self._messages, place, self._thread, *trained)  # type: ignore[no-untyped-call]

    def _receive(self, place: Place) -> Any:
        output, flags = self._messages.delivery(place).obj
        if not torch.is_grad_enabled() or not any(flags):
            return output
        tensors = list(tensors_of(output))
        arrived = [t for t, flag in zip(tensors, flags, strict=True) if flag]
        self._thread, *entered = _Received.apply(self._messages, place, arrived, self._thread)  # type: ignore[no-untyped-call]
        chosen = iter(entered)
        return with_tensors(
            output,
            iter([next(chosen) if f else t for t, f in zip(tensors, flags, strict=True)]),
        )

    def _connected(self, output: Any) -> Any:
        """The output, through which backward reaches all that was sent and received."""
        tensors = list(tensors_of(output))
        if not tensors:
            return output
        # All of them: which ones the loss depends on is not known here.
        connected = pseudo_connect(self._thread, *tensors)
        return with_tensors(output, iter(connected if len(tensors) > 1 else [connected]))


class _Sent(torch.autograd.Function):
    """What was sent: its backward waits for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, messages: Messages, place: Place, thread: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.messages, ctx.place = messages, place
        return thread.clone()

    @staticmethod
    @differentiable_once(_TWICE)
    def backward(ctx: Any, *grads: Tensor) -> Any:
        place = Place(BACKWARD, ctx.place.edge, 0, ctx.place.call)
        arrived = ctx.messages.delivery(place).obj
        return None, None, grads[0], *arrived


class _Received(torch.autograd.Function):
    """What has arrived: its backward sends the gradients."""

    @staticmethod
    def forward(
        ctx: Any, messages: Messages, place: Place, arrived: list[Tensor], thread: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.messages, ctx.place = messages, place
        ctx.set_materialize_grads(False)
        return thread.clone(), *arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        place = Place(BACKWARD, ctx.place.edge, 0, ctx.place.call)
        ctx.messages.send(place, list(grads[1:]), _WHOLE)
        # Once, when this pass ends: what was sent must have left before the script can exit.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.messages.finish_sends)
        return None, None, None, torch.zeros((), device="cpu") if grads[0] is None else grads[0]
