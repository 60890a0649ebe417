"""`MultiNodeChainList`: a model whose modules are on several ranks."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchmn.base.errors import UsageError, raise_if_no_count, raise_if_unknown
from torchmn.base.script_line import script_line
from torchmn.base.torch_private import at_end_of_backward
from torchmn.comm import Communicator
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.nn.chain_graph import (
    BACKWARD,
    FORWARD,
    Action,
    ChainGraph,
    Link,
)
from torchmn.nn.clipping import clip_grad_norm_, share_nonfinite_
from torchmn.nn.functions import pseudo_connect
from torchmn.nn.layer_communicator import differentiable_once, has_collective_layers
from torchmn.nn.messages import Messages, Place, Samples
from torchmn.nn.micro_batches import placed, tensors_of, with_tensors
from torchmn.nn.pipeline import Batch, LossFunction, NoSync, Pipeline, explained


class MultiNodeChainList(nn.Module):
    """A model whose modules are on several ranks, each of which makes its own part of the chain.

    Each rank adds its own modules and names the ranks before and after them: on rank 0
    ``chain.add_link(encoder, rank_out=1)``, on rank 1 ``chain.add_link(decoder, rank_in=0)``. On
    one rank alone:

    >>> chain = MultiNodeChainList(comm, num_microbatches=2)
    >>> chain.add_link(torch.nn.Linear(3, 1))
    >>> x, t = torch.ones(4, 3), torch.ones(4, 1)
    >>> loss = chain.forward_backward(x, t, torch.nn.functional.mse_loss)
    >>> loss.shape, chain.links["0_0"].weight.grad.shape
    (torch.Size([]), torch.Size([1, 3]))

    As a module it has the parameters of this rank only, under names that no other rank has:
    ``links.1_0.weight`` is of the first link of rank 1.

    Args:
        comm: the ranks of the chain; for several copies of it, the model axis of a grid.
        num_microbatches: the number of parts into which `forward_backward` cuts a batch, so that
            all ranks work at the same time. With m of them and n ranks of equal speed a step takes
            (m + n - 1) / m of the time of a rank that never waits.
            Each one goes backward as soon as possible (1F1B), so that a rank keeps the activations
            of few of them.

    Raises UsageError: ``num_microbatches`` is no count. Local.
    """

    def __init__(self, comm: Communicator, *, num_microbatches: int = 1) -> None:
        super().__init__()
        raise_if_no_count("num_microbatches", num_microbatches, "an integer")
        self.communicator = comm
        self.num_microbatches = num_microbatches
        self.links = nn.ModuleDict()
        self._specs: list[Link] = []
        self._graph: ChainGraph | None = None
        self._messages: Messages | None = None
        self._pipeline: Pipeline | None = None
        self._has_collective_layers = False
        self._no_sync: list[Callable[[], NoSync | None]] = []
        self._counts: list[Callable[[int], None]] = []

    def add_link(
        self,
        module: nn.Module,
        rank_in: int | Sequence[int] | None = None,
        rank_out: int | Sequence[int] | None = None,
    ) -> None:
        """Add a module of this rank. Local; the first call of the chain compares all ranks.

        Args:
            module: called with one argument for each rank in ``rank_in``: what that rank's module
                has returned, a tensor or tuples, lists and dicts with tensors.
            rank_in: the rank, or ranks, whose outputs are its inputs, this rank among them; None:
                the inputs of the script.
            rank_out: the rank, or ranks, that take its output; None: the script. One module of a
                rank may return its output to the script.

        The k-th output of one rank to another is the k-th input there, in the order of this method.
        Raises UsageError: the chain has run already.
        """
        comm = self.communicator
        if self._graph is not None:
            raise UsageError(
                f"{comm.rank_label}: add_link() after the chain has run. Add all links before the "
                "first forward() or forward_backward()."
            )
        name = f"{type(module).__name__}, {script_line()}"
        index = len(self._specs)
        self._specs.append(Link(comm.rank, index, name, _ranks(rank_in), _ranks(rank_out)))
        self.links[f"{comm.rank}_{index}"] = module

    def forward(self, *inputs: Any) -> Any:
        """The output of the chain for a whole batch, as ChainerMN's chain lists. *Collective.*

        Returns what the module with ``rank_out=None`` returns; on ranks without one a scalar, the
        delegate variable, whose ``backward()`` takes part in backward: all ranks must go backward,
        or none. To train, prefer `forward_backward`, which needs no delegate variables.

        Raises as `forward_backward`.
        """
        graph, messages = self._agreed()
        order = graph.order(1, has_backward=False)[self.communicator.rank]
        modules = list(self.links.values())
        forward_pass = ForwardPass(self.communicator, graph, modules, messages, order)
        try:
            return forward_pass.run(inputs)
        except BaseException:
            messages.abort()
            raise

    def forward_backward(
        self,
        inputs: Any = None,
        targets: Any = None,
        loss_fn: LossFunction | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        count: Callable[[Any], float] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor | None:
        """Forward and backward of a batch; gradients are added to ``p.grad``. *Collective.*

        They equal those of the whole batch in one process. Ranks ignore what they have no use for,
        so that all may be given the same.

        Args:
            inputs: the argument, or a tuple of the arguments, of the modules with ``rank_in=None``.
                Tensors are cut along dim 0; anything else goes to each micro-batch.
            targets: likewise for the loss.
            loss_fn: ``loss_fn(output, targets)``, or ``loss_fn(output)`` without targets; None: the
                output is the loss.
            reduction: whether the loss is a mean or a sum over its samples. For a mean,
                micro-batches are weighted by their numbers of samples.
            count: ``count(targets)`` is the number of items of which the loss is a mean, if these
                are not samples but, for example, the tokens that are not padding.
            scaler: a GradScaler, by whose scale the loss is multiplied here. A gradient that is not
                finite on one rank is made so on all, so that all scalers skip the same steps.

        Returns the loss of the batch, without graph and scale, on ranks with a module whose
        ``rank_out`` is None; None elsewhere.

        With an optimizer of `create_multi_node_optimizer` along a data axis gradients are exchanged
        during the last backward pass.

        Raises:
            UsageError: arguments are missing or of the wrong kind; links do not fit (on all ranks).
            RankMismatchError: the links of ranks do not fit, on all ranks, before data are sent; or
                inputs and targets belong to different batches.
            TimeLimitError, PeerLostError: a rank does not take part.
        """
        raise_if_unknown("reduction", reduction, ("mean", "sum"))
        graph, messages = self._agreed()
        if self._pipeline is None:
            self._pipeline = Pipeline(
                self.communicator,
                graph,
                list(self.links.values()),
                messages,
                graph.order(self.num_microbatches),
                self.num_microbatches,
                self._has_collective_layers,
            )
        batch = Batch(
            inputs=inputs if isinstance(inputs, tuple) or inputs is None else (inputs,),
            targets=targets,
            loss_fn=loss_fn,
            is_mean=reduction == "mean",
            count=count,
            scale=(lambda loss: loss) if scaler is None else scaler.scale,
            seen=self._count_samples,
        )
        if scaler is not None:  # begins its work, on ranks without a loss too
            scaler.scale(torch.zeros((), device=self.communicator.device))
        no_sync = [found for reference in self._no_sync if (found := reference()) is not None]
        loss = self._pipeline.step(batch, no_sync)
        if scaler is not None:
            share_nonfinite_(self, self.communicator)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks by their common norm, and return it. *Collective.*

        ``torch.nn.utils.clip_grad_norm_`` would see the gradients of this rank alone.
        """
        return clip_grad_norm_(self, max_norm, norm_type, comm=self.communicator)

    def register_no_sync(self, no_sync: NoSync) -> None:
        """Run all backward passes of a batch but the last inside of ``no_sync()``. Local.

        Optimizers of `create_multi_node_optimizer` do this.
        """
        is_method = inspect.ismethod(no_sync)
        self._no_sync.append(weakref.WeakMethod(no_sync) if is_method else lambda: no_sync)

    def register_count(self, count: Callable[[int], None]) -> None:
        """Call ``count`` with the samples of each micro-batch of `forward_backward`. Local."""
        self._counts.append(count)

    def _count_samples(self, num_samples: int) -> None:
        for count in self._counts:
            count(num_samples)

    def _agreed(self) -> tuple[ChainGraph, Messages]:
        """Gather the links of all ranks, once. *Collective.* Raises the same on all ranks."""
        if self._graph is None or self._messages is None:
            options = {"num_microbatches": self.num_microbatches}
            own = [(s.name, s.inputs, s.outputs) for s in self._specs]
            collective = has_collective_layers(self.links)
            gathered = self.communicator.allgather_obj((options, own, collective))
            raise_if_values_differ(
                f"{self.communicator.rank_label}: ranks have made the chain",
                [theirs for theirs, *_ in gathered],
                "Pass the same to MultiNodeChainList on all ranks.",
            )
            self._graph = ChainGraph(
                [
                    [Link(rank, index, *fields) for index, fields in enumerate(specs)]
                    for rank, (_, specs, _) in enumerate(gathered)
                ]
            )
            self._has_collective_layers = any(theirs for *_, theirs in gathered)
            self._messages = Messages(self.communicator)
        return self._graph, self._messages

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeChainList:
        """A copy over the same communicator, which agrees with its other ranks by itself."""
        getattr(self, "__getstate__", dict)()  # takes an eager step back
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        agreed = dict.fromkeys(("_graph", "_messages", "_pipeline"))
        own = {**vars(self), **agreed, "_no_sync": [], "_counts": []}
        vars(copied).update(copy.deepcopy(own, memo))
        return copied


def _ranks(ranks: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    return (ranks,) if isinstance(ranks, int) else tuple(ranks)


# A plain forward pass of a chain, and the order of the backward pass after it.
#
# Backward communicates inside of autograd, whose order differs between ranks. So on each rank a
# scalar runs through all that was sent and received, in the order of the forward pass: autograd
# must go back along it, and each rank communicates in the reverse of an order that has completed.

_WHOLE = Samples(1, 1)
_TWICE = (
    "A gradient that has arrived from another link of a chain was differentiated again, which "
    "chains cannot do. Write the exchange with torchmn.functions.send and recv, which can."
)


@dataclass(eq=False)
class ForwardPass:
    """One call of ``chain(...)`` on this rank."""

    _comm: Communicator
    _graph: ChainGraph
    _modules: Sequence[nn.Module]
    _messages: Messages
    _order: Sequence[Action]

    def __post_init__(self) -> None:
        self._call = self._messages.new_call()
        self._local: dict[int, Any] = {}
        self._thread = torch.zeros((), device="cpu", requires_grad=torch.is_grad_enabled())

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Run the links; return the output, or if there is none, the scalar to begin backward."""
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
        return with_tensors(output, iter(placed(entered, flags, tensors)))

    def _connected(self, output: Any) -> Any:
        """The output, through which backward reaches all that was sent and received."""
        tensors = list(tensors_of(output))
        if not tensors:
            return output
        # All of them: which ones the loss depends on is not known here.
        connected = pseudo_connect(self._thread, *tensors)
        return with_tensors(output, iter(connected if len(tensors) > 1 else [connected]))


class _Sent(torch.autograd.Function):
    """The node of a message that was sent: its backward receives the gradients."""

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
    """The node of a message that has arrived: its backward sends the gradients."""

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
        at_end_of_backward(ctx.messages.finish_sends)
        return None, None, None, torch.zeros((), device="cpu") if grads[0] is None else grads[0]
