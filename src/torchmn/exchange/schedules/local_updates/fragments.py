"""Fragments: parts of a model whose blocks end together, and the exchange of pseudo-gradients.

A fragment has an anchor, the point from which all ranks start, bit-identical on every rank. At the
end of a block each rank i contributes its pseudo-gradient ``anchor - w_i``, weighted by the number
of its samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.local_tensors import local_part
from torchmn.exchange.agreements.base import PassContext
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import NamedParameter, Slot, plan_buckets
from torchmn.exchange.codec_state import codec_state, load_codec_state
from torchmn.exchange.means import Means
from torchmn.exchange.packing import Packing
from torchmn.exchange.sharded_parameters import whole_of
from torchmn.exchange.sums import Sums, load_means


@dataclass(frozen=True, kw_only=True, eq=False)
class PseudoGradient:
    """The anchor and the mean pseudo-gradient of one parameter at the end of a block.

    >>> from torchmn.exchange.schedules.local_updates.fragments import PseudoGradient
    >>> block = PseudoGradient(name="weight", anchor=torch.ones(2), mean=torch.full((2,), 0.5))
    >>> block.anchor - block.mean  # the mean of the ranks' parameters
    tensor([0.5000, 0.5000])
    """

    name: str
    anchor: Tensor
    """The value at which the block began; the outer step moves it in place to that of the next."""
    mean: Tensor
    """The mean of ``anchor - w_i`` over ranks, weighted by samples; the shape of the anchor."""


class Fragment:
    """Some parameters, their anchors, and the buckets in which their pseudo-gradients are summed.

    At most one exchange is pending. With overlap a copy of the parameters at its start is kept, so
    that changes made while it is pending become part of the next block. ``scale`` is the
    `weight_scale` of the exchanges, the same on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Sequence[NamedParameter],
        anchors: dict[str, Tensor],
        scale: float,
    ) -> None:
        self.codec = codec
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.anchors = [anchors[name] for name in self.names]
        self.num_samples = 0.0
        """Samples of this rank (or its node) since the last exchange of this fragment."""
        self.steps_left = 0.0
        """Number of steps after which the pending exchange is waited for."""
        self._starts: list[Tensor] | None = None
        """The parameters when the pending exchange started; None without overlap."""
        footer = Footer(comm)
        buckets = BucketSet(
            comm,
            comm.route.allreduce_algorithm(codec),
            plan_buckets(
                parameters,
                granularity=comm.route.granularity,
                bucket_bytes=comm.route.bucket_bytes,
                num_footer=footer.num_values,
                allocate=comm.route.new_buffer,
            ),
            footer=footer,
            what="pseudo-gradients of a block",
        )
        buckets.warm_up()
        self._comm, self._buckets = comm, buckets
        self._packing: Packing | None = None
        self.sums: Sums
        """The sums of the exchange that was started last."""
        self._scale = scale
        self._anchor_of = dict(zip(self.names, self.anchors, strict=True))
        self._pseudo_gradients = [
            PseudoGradient(name=name, anchor=anchors[name], mean=buckets.slot_of[parameter].tensor)
            for name, parameter in parameters
        ]

    @torch.no_grad()
    def take_anchors(self) -> None:
        """Begin a block: the anchors become copies of the current parameters. Local."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def pack(self, weight: float, *, is_active: bool, step: int) -> None:
        """Begin an exchange and write this rank's part. *Collective*, but does not wait.

        A weight of zero contributes nothing, even if parameters are NaN.
        """
        context = PassContext(step=step, weight=weight, num_samples=weight, is_active=is_active)

        def write(slot: Slot, factor: float) -> None:
            torch.sub(self._anchor_of[slot.name], slot.parameter, out=slot.tensor).mul_(factor)

        self._packing = Packing(self._buckets, context, self._scale)
        self._packing.write(write)
        self.num_samples = 0.0

    @torch.no_grad()
    def move(self, changes: Sequence[Tensor]) -> None:
        """Add ``changes`` to the parameters, after `pack` and before `start`. Local.

        They are not part of the exchange, and its end undoes them. An empty list changes nothing.
        """
        for parameter, change in zip(self.parameters, changes, strict=bool(changes)):
            parameter.add_(change)

    def start(self, overlap_steps: float) -> None:
        """Hand all buckets to the engine and return at once."""
        self.steps_left = overlap_steps
        self._starts = [p.detach().clone() for p in self.parameters] if overlap_steps else None
        packing, self._packing = self._packing, None
        if packing is not None:
            self.sums = packing.sums.start_remaining()

    def pseudo_gradients(self) -> list[PseudoGradient]:
        """The anchors with the mean pseudo-gradients of the exchange that was waited for."""
        return self._pseudo_gradients

    @torch.no_grad()
    def restart(self) -> None:
        """Continue from the anchors, and keep the changes made while the exchange was pending."""
        starts, self._starts = self._starts, None
        if starts is None:
            self.reset_to_anchors()
            return
        # anchor + (parameter - start), computed in the memory of start.
        for anchor, parameter, start in zip(self.anchors, self.parameters, starts, strict=True):
            parameter.sub_(start.sub_(anchor))

    @torch.no_grad()
    def reset_to_anchors(self) -> None:
        """Continue from the anchors, and discard all changes since."""
        self._starts = None
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            parameter.copy_(anchor)

    # ---- state ----

    def state_dict(self, *, is_pending: bool, has_anchors: bool) -> dict[str, Any]:
        """The state of this rank. A pending exchange is waited for, and stays pending."""
        # First: waiting for the exchange completes the codec's state, which is saved below.
        exchange = self._exchange_state() if is_pending else {}
        changed = {}  # parameters that left their anchors, for loading on another number of ranks
        if has_anchors:
            rows = zip(self.names, self.parameters, self.anchors, strict=True)
            changed = {n: p.detach().clone() for n, p, a in rows if not torch.equal(p, a)}
        return {
            "names": self.names,
            "num_samples": self.num_samples,
            "codec": codec_state(self.codec, self._comm),
            "parameters": changed,
            "exchange": exchange,
        }

    def _exchange_state(self) -> dict[str, Any]:
        sums = self.sums
        sums.drain()
        total_weight = sums.total_weight
        if total_weight:
            sums.wait()
        return {
            "steps_left": self.steps_left,
            "starts": None if self._starts is None else [start.clone() for start in self._starts],
            "means": Means(sums).copies(),
            "total_weight": total_weight,
            "record": sums.record(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Resume from `state_dict`; an empty dict resets. Returns whether an exchange is pending.

        On the same number of ranks ``parameters`` equal the model's own; else they replace them.
        """
        self.num_samples = state.get("num_samples", 0.0)
        load_codec_state(self.codec, self._comm, state.get("codec", {}))
        changed = state.get("parameters", {})
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in changed:
                parameter.copy_(changed[name])
        exchange = state.get("exchange", {})
        if not exchange:
            return False
        total_weight, starts = exchange["total_weight"], exchange["starts"]
        self.sums = load_means(
            self._buckets, exchange["means"], exchange["record"], total_weight=total_weight
        )
        self.steps_left = exchange["steps_left"]
        self._starts = starts
        if starts is not None:
            rows = zip(starts, self.parameters, strict=True)
            self._starts = [start.to(parameter.device, copy=True) for start, parameter in rows]
        return True


def new_codecs(
    codec: Codec | None, parts: Sequence[Sequence[NamedParameter]], before: Sequence[Fragment]
) -> list[Codec | None]:
    """Return a codec for each fragment, as their exchanges end at different times. Local.

    The new codecs take over the residuals of the fragments ``before``, each those of its
    parameters.
    """
    if codec is None:
        return [None] * len(parts)
    # By names, as a parameter may have moved to another fragment: one was unfrozen, for instance.
    merged = _merged([fragment.codec.state_dict() for fragment in before if fragment.codec])
    codecs: list[Codec | None] = []
    for part in parts:
        new = codec.new_instance()
        if merged:
            new.load_state_dict(_of_parameters(merged, {name for name, _ in part}))
        codecs.append(new)
    return codecs


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of codecs for different parameters into one with all residuals."""
    merged: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, list):
                merged[key] = [*merged.get(key, []), *value]
            elif isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged.setdefault(key, value)
    return merged


def _of_parameters(state: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A codec state that is reduced to the residuals of the named parameters."""
    if "residuals" not in state:
        return state
    own = [entry for entry in state["residuals"] if entry["name"] in names]
    return {**state, "residuals": own}


def split_into_fragments(
    parameters: Sequence[NamedParameter], num_fragments: int
) -> list[list[NamedParameter]]:
    """Split parameters into consecutive parts of about the same number of bytes, none empty.

    Local. Raises UsageError: there are fewer parameters than parts.
    """
    if num_fragments > len(parameters):
        raise UsageError(
            f"num_fragments={num_fragments}, but {len(parameters)} parameters are trained. A "
            "fragment holds at least one: use fewer fragments."
        )
    total = sum(parameter.nbytes for _, parameter in parameters)
    parts: list[list[NamedParameter]] = [[]]
    nbytes = 0
    for position, (name, parameter) in enumerate(parameters):
        num_left = len(parameters) - position
        is_full = nbytes + parameter.nbytes / 2 > total * len(parts) / num_fragments
        must_open = num_left == num_fragments - len(parts)
        if parts[-1] and len(parts) < num_fragments and (is_full or must_open):
            parts.append([])
        parts[-1].append((name, parameter))
        nbytes += parameter.nbytes
    return parts


def trained_and_frozen(
    parameters: Sequence[NamedParameter], known: Collection[str]
) -> tuple[list[NamedParameter], list[Tensor]]:
    """Divide floating-point and complex parameters into those to exchange and the others. Local.

    Exchanged are those that are trained and those named in ``known``; all if there are none. A
    frozen one keeps the value with which all ranks began: its anchor and its bytes would be for
    nothing, and where adapters are trained (LoRA) nearly all are frozen.
    """
    numbers = [(n, p) for n, p in parameters if p.is_floating_point() or p.is_complex()]
    names = {n for n, p in numbers if n in known or is_trained(p)} or {n for n, _ in numbers}
    frozen: list[Tensor] = [p for n, p in numbers if n not in names]
    return [(n, p) for n, p in numbers if n in names], frozen


def is_trained(parameter: Tensor) -> bool:
    """Whether a step may change it: optimizers change a frozen one only if it has a gradient."""
    whole = whole_of(parameter)
    return whole.requires_grad or whole.grad is not None


def raise_if_of_others(
    state: Mapping[str, Any], num_fragments: int, anchors: Mapping[str, Tensor]
) -> None:
    """Raise UsageError: a saved state has other fragments or anchors. Local."""
    num_saved = len(state.get("fragments", range(num_fragments)))
    if num_saved != num_fragments:
        raise UsageError(
            f"This state was saved with num_fragments={num_saved}, and here it is {num_fragments}. "
            "Use the same number."
        )
    saved = state.get("anchors") or anchors
    if saved.keys() != anchors.keys():
        odd = sorted(saved.keys() ^ anchors.keys())
        raise UsageError(f"The saved anchors are of other parameters; they differ in {odd[:5]}.")


MOMENTUM_BUFFERS = ("momentum_buffer", "exp_avg")
"""The names of first moments in torch's optimizers: of SGD and RMSprop, and of Adam's variants."""


def reset_momentum_(
    state: Mapping[Tensor, Mapping[str, object]], parameters: Sequence[nn.Parameter]
) -> None:
    """Set an optimizer's first moments to zero, but not second moments or step counts. Local."""
    for parameter in parameters:
        for name in MOMENTUM_BUFFERS:
            value = state.get(whole_of(parameter), {}).get(name)
            if isinstance(value, Tensor):
                value.zero_()


@torch.no_grad()
def restart_where_not_finite_(
    state: Mapping[Tensor, MutableMapping[str, Any]], parameters: Sequence[nn.Parameter]
) -> None:
    """Reset the optimizer state of parameters where some of it is not finite. Local.

    One gradient that is not finite would otherwise make every later step nonfinite. Such tensors
    become zero, and so does the step count of their parameter, from which Adam corrects its
    moments.
    """
    for parameter in parameters:
        own = state.get(whole_of(parameter), {})
        tensors = [local_part(value) for value in own.values() if isinstance(value, Tensor)]
        lost = [tensor for tensor in tensors if not bool(torch.isfinite(tensor).all())]
        for tensor in lost:
            tensor.zero_()
        if lost and "step" in own:
            own["step"] = own["step"] * 0


class FragmentSchedule:
    """Counts the samples of a worker and decides which fragment's block is full. Local.

    ``share`` is the number of samples of this worker in a block. Of F fragments, number f is due
    when ``(f + 1) / F`` of it was counted; after the last one the count starts again from zero.
    """

    def __init__(self, num_fragments: int, share: float) -> None:
        self.num_fragments = num_fragments
        self.share = share
        self.restart()

    def restart(self) -> None:
        """Begin a block of the first fragment."""
        self._next = 0
        self._samples = 0.0
        self._num_due = 0

    def count(self, num_samples: float) -> None:
        """Add samples that this worker has processed."""
        self._samples += num_samples
        # In a loop: one batch may fill the blocks of several fragments.
        position = (self._next + self._num_due) % self.num_fragments
        while self._samples * self.num_fragments >= self.share * (position + 1):
            self._num_due += 1
            position += 1
            if position == self.num_fragments:
                position, self._samples = 0, 0.0

    def take_due(self) -> bool:
        """Whether the next fragment is due; reports each fragment once."""
        is_due = self._num_due > 0
        self._num_due -= is_due
        return is_due

    def advance(self) -> int:
        """Return the index of the next fragment to exchange, and move on to the one after it."""
        index = self._next
        self._next = (index + 1) % self.num_fragments
        return index

    def state_dict(self) -> dict[str, Any]:
        """The position in the order and the samples counted so far."""
        return {"next": self._next, "samples": self._samples, "num_due": self._num_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`."""
        self._next, self._samples = state["next"], state["samples"]
        self._num_due = state["num_due"]
