"""Parts of a model whose blocks end together, and the exchange of what was learned in a block.

A fragment has an anchor, the point from which all ranks set out, the same bits on every rank. At
the end of a block each rank i contributes how far it went, ``anchor - w_i``, weighted by its
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.compression import Codec
from torchmn.errors import UsageError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.gradients.buckets import NamedParameter, plan_buckets
from torchmn.gradients.footer import NUM_FOOTER
from torchmn.gradients.weights import PassContext


@dataclass(frozen=True, kw_only=True, eq=False)
class Movement:
    """One parameter at the end of a block."""

    name: str
    anchor: Tensor
    """Where the block began; to be moved, in place, to where the next one begins."""
    mean: Tensor
    """How far ranks went, ``anchor - w_i``, their mean weighted by samples."""


class Fragment:
    """Some parameters, their anchors, and the buckets in which their movements travel."""

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Sequence[NamedParameter],
        anchors: dict[str, Tensor],
        unit: float,
    ) -> None:
        self.codec = codec
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.anchors = [anchors[name] for name in self.names]
        self.num_samples = 0.0
        """What this rank (or its node) has seen since the last exchange of this fragment."""
        self.movements = BucketSet(
            comm,
            comm.allreduce_algorithm(codec),
            plan_buckets(
                parameters,
                granularity=comm.granularity,
                bucket_bytes=comm.bucket_bytes,
                num_footer=NUM_FOOTER,
                allocate=comm.new_buffer,
            ),
            what="movements of a block",
        )
        self.movements.warm_up()
        self._scale = unit
        self._slots = [self.movements.slot_of[parameter].tensor for parameter in self.parameters]
        self._anchor_of = dict(zip(self.names, self.anchors, strict=True))

    @torch.no_grad()
    def take_anchors(self) -> None:
        """Set out from here: the anchors become the parameters."""
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def pack(self, weight: float, *, is_active: bool, step: int) -> None:
        """Begin an exchange and write this rank's part. *Collective*, though it waits for nothing.

        A weight of zero contributes nothing, even where that is NaN.
        """
        movements = self.movements
        movements.restart()
        context = PassContext(step=step, weight=weight, num_samples=weight, is_active=is_active)
        movements.begin(context, self._scale)
        factor = weight / (movements.comm.size * self._scale)
        for slot in movements.slots:
            if factor == 0.0:
                slot.tensor.zero_()
            else:
                anchor = self._anchor_of[slot.name]
                torch.sub(anchor, slot.parameter, out=slot.tensor).mul_(factor)
            movements.note(slot)
        movements.write_footer()

    def means(self) -> list[Movement]:
        """What was agreed on, after the exchange was waited for."""
        return [
            Movement(name=name, anchor=anchor, mean=slot)
            for name, anchor, slot in zip(self.names, self.anchors, self._slots, strict=True)
        ]

    @torch.no_grad()
    def restart(self, starts: list[Tensor] | None) -> None:
        """Go on from the anchors. ``starts``: keep what was learned since the parameters were so.

        ``starts`` is used up.
        """
        if starts is None:
            for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
                parameter.copy_(anchor)
            return
        for anchor, parameter, start in zip(self.anchors, self.parameters, starts, strict=True):
            parameter.sub_(start.sub_(anchor))

    def copies(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [parameter.detach().clone() for parameter in self.parameters]


def cut_into_fragments(
    parameters: Sequence[NamedParameter], num_fragments: int
) -> list[list[NamedParameter]]:
    """Consecutive parts of about equally many bytes, none empty.

    Raises UsageError: there are fewer parameters than parts.
    """
    if num_fragments > len(parameters):
        raise UsageError(
            f"num_fragments={num_fragments}, but the optimizer has {len(parameters)} parameters. A "
            "fragment holds at least one."
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


def with_means(parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Those that a mean makes sense of, floating point or complex; frozen ones too."""
    return [(n, p) for n, p in parameters if p.is_floating_point() or p.is_complex()]


SMOOTHED_GRADIENTS = ("momentum_buffer", "exp_avg")
"""What torch's optimizers call a smoothed gradient: SGD and RMSprop; Adam and its relatives."""


def reset_smoothed_gradients_(
    state: Mapping[Tensor, Mapping[str, object]], parameters: Sequence[nn.Parameter]
) -> None:
    """Set the smoothed gradients of an optimizer to zero. Second moments and counts stay. Local."""
    for parameter in parameters:
        for name in SMOOTHED_GRADIENTS:
            value = state.get(parameter, {}).get(name)
            if isinstance(value, Tensor):
                value.zero_()
