"""One step of a pipeline on this rank: micro-batches forward and backward through its links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchmn.base.errors import RankMismatchError, UsageError
from torchmn.comm import Communicator
from torchmn.data.batch_size import num_samples
from torchmn.nn.chain_graph import BACKWARD, FORWARD, Action, ChainGraph, Edge, Link
from torchmn.nn.messages import Messages, Place, Samples
from torchmn.nn.micro_batches import (
    part_of,
    placed,
    samples_to_cut,
    split,
    tensors_of,
    with_tensors,
)

LossFunction = Callable[..., Tensor]
NoSync = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments that the script gives to a step on this rank.

    ``count(targets)`` is the weight of a micro-batch, or of the batch, in the mean. ``scale`` turns
    the loss into the tensor with which backward begins.
    """

    inputs: tuple[Any, ...] | None
    targets: Any
    loss_fn: LossFunction | None
    is_mean: bool
    count: Callable[[Any], float] | None
    scale: Callable[[Tensor], Tensor]
    # Called with the number of samples of each micro-batch, before its backward pass.
    seen: Callable[[int], None]


@dataclass
class _Pass:
    """A micro-batch between its forward and its backward pass through a link."""

    arrivals: dict[int, _Arrival]  # by the number of the edge
    output: Any
    samples: Samples
    loss: Tensor | None = None


@dataclass
class _Arrival:
    """Tensors that have arrived from another link, and their gradients."""

    num: int = 0
    grads: list[Tensor | None] = field(default_factory=list)


@dataclass(eq=False)
class Pipeline:
    """Runs the batches of one rank. *Collective* to make."""

    comm: Communicator
    graph: ChainGraph
    modules: Sequence[nn.Module]
    messages: Messages
    orders: Sequence[Sequence[Action]]
    num_microbatches: int
    # Whether micro-batches without samples, or without a loss, run through the links: the layers of
    # other chains, whose batches are of other sizes, wait for them.
    runs_all: bool

    def __post_init__(self) -> None:
        self.order = self.orders[self.comm.rank]
        # How many messages of a batch each rank sends to this one.
        self.num_messages = {
            peer: sum(self._num_sent_by(action) for action in order)
            for peer, order in enumerate(self.orders)
            if peer != self.comm.rank
        }

    def step(self, batch: Batch, no_sync: Sequence[NoSync]) -> Tensor | None:
        """Run forward and backward; return the loss on ranks with an output. *Collective.*"""
        step = _Step(self, batch, no_sync)
        try:
            return step.run()
        except BaseException:
            self.messages.abort()
            raise

    def _num_sent_by(self, action: Action) -> int:
        """Number of messages that an action of another rank sends to this one."""
        own, key = self.comm.rank, action.link.key
        if action.kind == FORWARD:
            return sum(edge.target.rank == own for edge in self.graph.outgoing.get(key, []))
        return sum(edge.source.rank == own for edge in self.graph.incoming.get(key, []))


class _Step:
    """One call of forward_backward."""

    def __init__(self, pipeline: Pipeline, batch: Batch, no_sync: Sequence[NoSync]) -> None:
        self._pipeline = pipeline
        self._comm = pipeline.comm
        self._graph = pipeline.graph
        self._messages = pipeline.messages
        self._num_parts = pipeline.num_microbatches
        self._runs_all = pipeline.runs_all
        self._batch = batch
        self._call = self._messages.new_call()
        self._no_sync = no_sync
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._losses: list[Tensor] = []
        links = self._graph.links[self._comm.rank]
        self._takes_input = any(link.inputs is None for link in links)
        self._has_output = any(link.outputs is None for link in links)
        self._inputs, self._input_samples = self._cut_inputs()
        self._targets, self._target_samples = self._cut_targets()

    def run(self) -> Tensor | None:
        """Run the actions of this rank in order."""
        for peer, num in self._pipeline.num_messages.items():
            if num:
                self._messages.prefetch(peer, num)
        for index, action in enumerate(self._pipeline.order):
            if action.kind == FORWARD:
                self._forward(action.link, action.microbatch)
            else:
                self._backward(action.link, action.microbatch, index)
        self._messages.finish_sends()
        if not self._has_output:
            return None
        return (
            torch.stack(self._losses).sum()
            if self._losses
            else torch.zeros((), device=self._comm.device)
        )

    # ---- the batch ----

    def _cut_inputs(self) -> tuple[list[Any], list[int]]:
        if not self._takes_input:
            return [], []
        if self._batch.inputs is None:
            raise UsageError(
                f"{self._comm.rank_label}: a link of this rank takes the inputs of the script "
                "(rank_in=None), but forward_backward() was given inputs=None."
            )
        return self._cut(self._batch.inputs, "inputs")

    def _cut_targets(self) -> tuple[list[Any], list[int]]:
        if not self._has_output or self._batch.targets is None:
            return [None] * self._num_parts, []
        return self._cut(self._batch.targets, "targets")

    def _cut(self, batch: Any, name: str) -> tuple[list[Any], list[int]]:
        if self._num_parts == 1:
            found = num_samples(batch)
            total = 1 if found is None else found
            parts = [batch]
        else:
            total = samples_to_cut(batch, f"{name} on rank {self._comm.rank}")
            parts = split(batch, self._num_parts)
        if total == 0:
            raise UsageError(
                f"{self._comm.rank_label}: {name} of forward_backward() have no samples. Leave the "
                "step out on all ranks of the chain."
            )
        small, rest = divmod(total, self._num_parts)
        return parts, [small + (i < rest) for i in range(self._num_parts)]

    # ---- forward ----

    def _forward(self, link: Link, microbatch: int) -> None:
        arguments, arrivals, samples = self._arguments(link, microbatch)
        output = loss = None
        if link is self._graph.links[self._comm.rank][0]:
            self._batch.seen(samples.of_part)
        if samples.of_part or self._runs_all:
            module = self._pipeline.modules[link.index]
            with explained(self._comm, self._graph, link, arguments), part_of(samples.of_batch):
                output = module(*arguments)
            if link.outputs is None and samples.of_part:
                loss = self._loss(link, output, microbatch, samples)
        self._passes[link.index, microbatch] = _Pass(arrivals, output, samples, loss)
        for edge in self._graph.outgoing.get(link.key, []):
            flags = [tensor.requires_grad for tensor in tensors_of(output)]
            self._messages.send(
                Place(FORWARD, edge, microbatch, self._call), (output, flags), samples
            )

    def _arguments(
        self, link: Link, microbatch: int
    ) -> tuple[Sequence[Any], dict[int, _Arrival], Samples]:
        if link.inputs is None:
            sizes = self._input_samples
            samples = Samples(sizes[microbatch], sum(sizes))
            return self._inputs[microbatch], {}, samples
        arguments: list[Any] = []
        arrivals: dict[int, _Arrival] = {}
        by_edge: dict[Edge, Samples] = {}
        for edge in self._graph.incoming[link.key]:
            place = Place(FORWARD, edge, microbatch, self._call)
            delivery = self._messages.delivery(place)
            by_edge[edge] = delivery.samples
            arrivals[edge.number] = arrival = _Arrival()
            if delivery.samples.of_part or self._runs_all:
                output, flags = delivery.obj
                arguments.append(_entered(output, flags, arrival))
        if len(set(by_edge.values())) > 1:
            seen = "; ".join(f"{s.of_batch} from {e.source}" for e, s in by_edge.items())
            raise RankMismatchError(
                f"{self._comm.rank_label}: the inputs of {link} belong to batches of different "
                f"sizes: {seen}. Give all ranks that take inputs the same number of samples."
            )
        return arguments, arrivals, next(iter(by_edge.values()))

    def _loss(self, link: Link, output: Any, microbatch: int, samples: Samples) -> Tensor | None:
        batch, targets = self._batch, self._targets[microbatch]
        sizes = self._target_samples
        if sizes and sum(sizes) != samples.of_batch:
            raise RankMismatchError(
                f"{self._comm.rank_label}: {link} has targets of {sum(sizes)} samples, but the "
                f"inputs that reach it have {samples.of_batch}. Give forward_backward() the inputs "
                "and targets of the same batch."
            )
        arguments = [output] if batch.targets is None else [output, targets]
        loss = output if batch.loss_fn is None else batch.loss_fn(*arguments)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            seen = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"{self._comm.rank_label}: the loss of {link} must be a tensor with one element, "
                f"not {seen}. Give forward_backward() a loss_fn that returns a mean or a sum over "
                "the samples."
            )
        share = 1.0
        if batch.count is not None:
            total = float(batch.count(batch.targets))
            share = float(batch.count(targets)) / total if total else 0.0
        elif batch.is_mean:
            share = samples.of_part / samples.of_batch
        if share == 0.0:  # the mean over nothing is not a number
            return None
        weighted = loss.reshape(()) * share
        self._losses.append(weighted.detach())
        return weighted

    # ---- backward ----

    def _backward(self, link: Link, microbatch: int, index: int) -> None:
        done = self._passes.pop((link.index, microbatch))
        roots: list[Tensor] = []
        grads: list[Tensor | None] = []
        if done.loss is not None and done.loss.requires_grad:
            roots.append(self._batch.scale(done.loss))
            grads.append(None)
        trained = [t for t in tensors_of(done.output) if t.requires_grad]
        # Layers of other chains wait for those of this one in backward: run it, with zeros.
        if link.outputs is None and done.loss is None and self._runs_all:
            roots += trained
            grads += map(torch.zeros_like, trained)
        for edge in self._graph.outgoing.get(link.key, []):
            place = Place(BACKWARD, edge, microbatch, self._call)
            arrived = self._messages.delivery(place).obj
            for tensor, grad in zip(trained, arrived, strict=True):
                if grad is not None:
                    roots.append(tensor)
                    grads.append(grad)
        if roots:
            with ExitStack() as stack:
                # torch advises against backward under autocast, which the script may have entered.
                stack.enter_context(torch.autocast(self._comm.device.type, enabled=False))
                if not self._is_last_pass(index, done.samples):
                    for no_sync in self._no_sync:
                        stack.enter_context(no_sync())
                stack.enter_context(part_of(done.samples.of_batch))  # where forward runs again
                torch.autograd.backward(roots, grads)
        for edge in self._graph.incoming.get(link.key, []):
            arrival = done.arrivals[edge.number]
            self._messages.send(
                Place(BACKWARD, edge, microbatch, self._call),
                arrival.grads or [None] * arrival.num,
                done.samples,
            )

    def _is_last_pass(self, index: int, samples: Samples) -> bool:
        """Whether no backward pass of this rank follows: later micro-batches may be empty."""
        return not any(
            action.kind == BACKWARD and (self._runs_all or action.microbatch < samples.of_batch)
            for action in self._pipeline.order[index + 1 :]
        )


@dataclass
class _Tensors:
    """Hides tensors from autograd, which would make views of arguments that are returned."""

    tensors: tuple[Tensor, ...]


class _Enter(torch.autograd.Function):
    """Makes tensors that have arrived the beginning of a graph, and keeps their gradients.

    They are no leaves, so that a link may begin with an operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, arrival: _Arrival, arrived: _Tensors
    ) -> tuple[Tensor, ...]:
        ctx.arrival = arrival
        ctx.set_materialize_grads(False)
        return arrived.tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.arrival.grads = list(grads)
        return None, None, None


def _entered(obj: Any, flags: Sequence[bool], arrival: _Arrival) -> Any:
    """Make the output of another link an input; ``flags`` tells which tensors need a gradient."""
    tensors = list(tensors_of(obj))
    # detached: on its own rank an output still belongs to the graph of the link before
    trained = tuple(t.detach() for t, flag in zip(tensors, flags, strict=True) if flag)
    arrival.num = len(trained)
    if not trained:
        return obj
    anchor = torch.zeros((), requires_grad=True, device="cpu")
    entered = _Enter.apply(anchor, arrival, _Tensors(trained))  # type: ignore[no-untyped-call]
    return with_tensors(obj, iter(placed(entered, flags, tensors)))


@contextmanager
def explained(
    comm: Communicator, graph: ChainGraph, link: Link, arguments: Sequence[Any]
) -> Iterator[None]:
    """Add a note to an error of a link: the kinds of its inputs, and where they came from."""
    try:
        yield
    except Exception as error:
        sources = [edge.source for edge in graph.incoming.get(link.key, [])]
        if sources and hasattr(error, "add_note"):
            parts = [
                f"{', '.join(map(_kind, tensors_of(argument))) or 'no tensor'} from {source}"
                for argument, source in zip(arguments, sources, strict=True)
            ]
            error.add_note(f"{comm.rank_label}: the inputs of {link} are {'; '.join(parts)}.")
        raise


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
