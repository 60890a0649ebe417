"""The buckets of one exchange, and how their sums become means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.communicators.allreduce import Wire
from torchmn.communicators.engine import Work
from torchmn.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.gradients.buckets import Bucket
from torchmn.gradients.chunks import Chunk, cut_into_chunks
from torchmn.gradients.weight_scale import weight_scale
from torchmn.gradients.weight_sum import WeightAgreement

(
    WEIGHT,
    ACTIVE,
    NONFINITE,
    SAMPLES,
    NUM_EXCHANGES,
    GIVEN_UP,
    OTHER_LAYOUT,
    LOADED,
    FLAGGED_RANKS,
    NUM_FOOTER,
) = range(10)
"""What the footer holds; then come presence flags, one per parameter, if asked for."""

_FLAGS = {
    GIVEN_UP: (
        "raised an exception in its backward pass, so there are no means of this step. Handle the "
        "exception on all ranks, for instance by a collective that tells the others, and leave the "
        "step out or repeat it on all"
    ),
    OTHER_LAYOUT: (
        "changed the dtype, device, shape or requires_grad of its parameters since the last "
        "exchange. Do the same on all ranks, between the same steps"
    ),
    LOADED: (
        "loaded an optimizer state since the last exchange. Call load_state_dict() on all ranks, "
        "between the same steps, or only before create_multi_node_optimizer, which gives all ranks "
        "the state of rank 0"
    ),
}
"""What ranks do together or not at all, and what a rank did alone."""
_COUNT_MODULUS = 4096  # so that float32 can hold the sum of the counts of many ranks


Reduction = Literal["mean", "sum"]
"""What becomes of the ranks' gradients."""


@dataclass(frozen=True)
class NonfiniteGradients:
    """Gradients of one step, or movements of one block, that were not finite. Same on all ranks."""

    step: int
    by_rank: dict[int, list[str]] = field(default_factory=dict)
    """The parameters by the rank whose gradient it was; empty if only the sum overflowed."""
    in_sum: list[str] = field(default_factory=list)
    what: str = "gradients"

    def __str__(self) -> str:
        ranks = "; ".join(
            f"rank {rank}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for rank, names in self.by_rank.items()
        )
        return f"at step {self.step} {self.what} were not finite ({ranks or 'in the sum only'})"


class BucketSet:
    """The buckets of one exchange and the sums under way in them.

    Gradients are packed as ``weight / (size * unit)`` times themselves and the footer holds the
    weight itself: with weights w_i the mean is the sum times ``size * unit / sum(w_i)``, and with
    ``reduction="sum"`` the sum of w_i g_i is the sum times ``size * unit``.

    They leave in chunks, each once in an exchange. Either `wait` turns all of it into means, or
    `await_footer` and then `take`, parameter by parameter.
    """

    def __init__(
        self,
        comm: Communicator,
        wire: Wire,
        buckets: list[Bucket],
        chunk_bytes: int | None = None,
        what: str = "gradients",
        reduction: Reduction = "mean",
    ) -> None:
        self.reduction = reduction
        self.comm = comm
        self.wire = wire
        self.buckets = buckets
        self.chunks = cut_into_chunks(buckets, chunk_bytes, wire.codec)
        self.chunks_of: dict[nn.Parameter, list[Chunk]] = {
            parameter: [] for bucket in buckets for parameter in bucket.parameters
        }
        for chunk in self.chunks:
            for parameter in chunk.parameters:
                self.chunks_of[parameter].append(chunk)
        self.what = what
        self.unit = 1.0
        self.next_unit: float | None = 1.0
        """The unit that suits the weights seen in this exchange."""
        self._footer = buckets[-1].footer if buckets else torch.zeros(NUM_FOOTER, device="cpu")
        self._agreement: WeightAgreement | None = None
        self._works: dict[Chunk, Work[None]] = {}
        self._num_left = len(self.chunks)
        self._factor = 1.0
        self._holds_means = True
        self._sums: list[tuple[str, Tensor]] = []
        self._nonfinite_here: list[str] = []
        self._nonfinite_encoded: list[str] = []
        self._nonfinite_decoded: list[str] = []
        self.sparse_means: dict[nn.Parameter, Tensor | None] = {}
        """Of parameters whose gradients are sparse, which are in no bucket."""
        self.weight = 0.0
        """Of this rank in the exchange under way."""
        self._is_valid = True
        self._step = 0
        self._sent_count = 0

    @property
    def is_narrow(self) -> bool:
        """Whether values beyond float16's range would be lost on the way."""
        return self.wire.codec is not None or any(
            bucket.buffer.dtype == torch.float16 for bucket in self.buckets
        )

    @property
    def keeps_residuals(self) -> bool:
        """Whether what earlier exchanges have lost is added to this one: see `agree_on_weight`."""
        return self.wire.codec is not None and self.wire.codec.keeps_residuals

    @property
    def order(self) -> list[nn.Parameter]:
        """The parameters in the order in which they are packed."""
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def warm_up(self) -> None:
        """Compile what the codec needs now, so that no step has to."""
        codec = self.wire.codec
        if codec is None or self.comm.size == 1:
            return
        layouts = {bucket.cargo.layout.dtype: bucket.cargo.layout for bucket in self.buckets}
        for layout in layouts.values():
            if layout.numel:
                codec.warm_up(layout, self.buckets[0].buffer.device)

    def pack(self, bucket: Bucket, position: int, scale: float) -> bool:
        """`Bucket.pack`, and remember whether what was packed is finite."""
        result = bucket.pack(position, scale)
        self.note(bucket, position)
        return result

    def note(self, bucket: Bucket, position: int) -> None:
        """Remember whether what was written into a slot is finite."""
        # Straight after the copy the slot is in the cache: a sum costs a fifth of the copy.
        slot = bucket.slots[position]
        if slot.device.type != "cpu" and slot.numel():  # nobody looks again if a sum overflows
            total = torch.linalg.vector_norm(slot, float("inf"))
        else:
            narrow = slot.dtype in (torch.float16, torch.bfloat16)
            total = slot.sum(dtype=torch.float32) if narrow else slot.sum()
        self._sums.append((bucket.names[position], total))

    def write_footer(
        self,
        weight: float,
        *,
        is_active: bool,
        presence: Sequence[bool] = (),
        num_samples: float = 0.0,
        flags: Sequence[int] = (),
        num_exchanges: int = 0,
    ) -> None:
        """What this rank says about its part.

        ``flags``: of `GIVEN_UP`, `OTHER_LAYOUT`, `LOADED`, what all ranks must say or none;
        ``num_exchanges``: of this rank until now, which must be the same on all.
        """
        self.weight = weight
        if self.buckets:
            self._sent_count = num_exchanges % _COUNT_MODULUS
            row = [0.0] * (self._footer.numel() - len(presence)) + [float(p) for p in presence]
            row[WEIGHT], row[ACTIVE], row[SAMPLES] = weight, float(is_active), num_samples
            row[NUM_EXCHANGES] = float(self._sent_count)
            for flag in flags:
                row[flag], row[FLAGGED_RANKS] = 1.0, float(self.comm.rank + 1)
            self._footer.copy_(torch.tensor(row, dtype=torch.float64, device="cpu"))
            if self._sums:
                self._footer[NONFINITE] = self._look_at_sums()

    def _look_at_sums(self) -> Tensor | float:
        """How many gradients of this rank are not finite; a GPU is not waited for."""
        if self._footer.device.type != "cpu":
            totals = torch.stack([total.abs().to(torch.float32) for _, total in self._sums])
            return (~torch.isfinite(totals)).sum()
        self._nonfinite_here = [
            name for name, total in self._sums if not math.isfinite(abs(total.item()))
        ]
        if self._nonfinite_here:  # or large values that overflow in their sum
            slots = {n: s for b in self.buckets for n, s in zip(b.names, b.slots, strict=True)}
            self._nonfinite_here = [
                name for name in self._nonfinite_here if not torch.isfinite(slots[name]).all()
            ]
        self._sums.clear()
        return float(len(self._nonfinite_here))

    def agree_on_weight(
        self, weight: float, *, is_active: bool, unit: float | None
    ) -> WeightAgreement:
        """Begin an exchange with the sum of the ranks' weights. *Collective*; it waits for nothing.

        ``unit``: in which weights are counted, the same on all ranks; None to agree on one.
        """
        self._agreement = WeightAgreement(
            self.comm, weight, is_active=is_active, unit=unit, then=self._begin
        )
        return self._agreement

    def _begin(self, total_weight: float, unit: float) -> None:
        """Behind the sum of weights, before anything is encoded; inside of the engine's job."""
        factor = self._factor_of(total_weight, unit)
        if self.wire.codec is not None:
            self.wire.codec.begin(1 / factor if factor else 0.0)

    def start(self, chunk: Chunk, step: int) -> None:
        """Hand one chunk to the engine."""
        then = self._after(step)
        self._works[chunk] = self.comm.start_sum_(
            chunk.cargo, self.wire, bucket=chunk.index, step=step, then=then
        )

    def sum_now(self, chunk: Chunk, step: int) -> None:
        """Sum one chunk and wait for it: without a change of thread if nothing is in flight."""
        then = self._after(step)
        self.comm.sum_(chunk.cargo, self.wire, bucket=chunk.index, step=step, then=then)

    def _after(self, step: int) -> Callable[[], None] | None:
        """What ends an exchange, behind its last chunk and before anything else is encoded."""
        self._holds_means = False
        self._step = step
        self._num_left -= 1
        if self._num_left:
            return None
        self._num_left = len(self.chunks)
        return self._finish

    def _finish(self) -> None:
        codec = self.wire.codec
        if codec is None:
            return
        self._nonfinite_decoded = codec.nonfinite.names("decoding")
        self._nonfinite_encoded = codec.nonfinite.names("encoding")
        is_decoded = self.comm.agree(not self._nonfinite_decoded)
        self._is_valid = is_decoded and self.has_finite_gradients
        # A sum that is thrown away has lost nothing, and what was added to it is still lost.
        footer = self._footer.tolist()
        is_used = footer[WEIGHT] > 0 and not footer[GIVEN_UP] and not footer[OTHER_LAYOUT]
        codec.finish(is_valid=self._is_valid and is_used)

    def drain(self) -> None:
        """Wait for all sums, whatever they are."""
        self._await_agreement()
        for work in self._works.values():
            work.wait()
        self._works.clear()

    def await_bucket(self, bucket: Bucket) -> None:
        """Wait for the sums of one bucket, which `wait` has not made means yet."""
        for parameter in bucket.parameters:
            for chunk in self.chunks_of[parameter]:
                if chunk in self._works:
                    self._works[chunk].wait()

    def wait(self) -> bool:
        """Wait for all sums and turn them into means; once more changes nothing.

        Returns whether sums were scaled. Raises UsageError on all ranks: the weights of the active
        ranks add up to zero.
        """
        self.drain()
        if self._holds_means:
            return False
        self.await_footer()
        if self._factor != 1.0:
            for bucket in self.buckets:
                bucket.buffer[: bucket.buffer.numel() - bucket.footer.numel()].mul_(self._factor)
        self._holds_means = True
        return self._factor != 1.0

    def await_footer(self) -> None:
        """Wait for what the ranks said of their parts. Raises UsageError: see `wait`."""
        self._await_agreement()
        footer_work = self._works.get(self.chunks[-1]) if self.chunks else None
        if footer_work is not None:
            footer_work.wait()
        self.raise_if_flags_differ()
        total = self.total_weight
        self.next_unit = weight_scale(total, self.num_active)
        self._factor = self._factor_of(total, self.unit)
        if total == 0.0 and self.num_active and self.reduction == "mean":
            raise UsageError(
                f"{self.comm.rank_label}: the weights of all ranks are zero. With weight='samples' "
                "the model's forward must see a tensor with a batch dimension; else call "
                "optimizer.set_weight(number_of_samples) before backward()."
            )

    def _factor_of(self, total: float, unit: float) -> float:
        """By what a sum is multiplied to make it the mean, or what else was asked for."""
        if total == 0.0:
            return 0.0
        return self.comm.size * unit / (1.0 if self.reduction == "sum" else total)

    def raise_if_flags_differ(self) -> None:
        """Raise RankMismatchError if only some ranks did what all must do, after `await_footer`.

        On all ranks, and without another message. CommunicationError: the ranks are at different
        exchanges.
        """
        footer, size = self._footer.tolist() if self.buckets else [0.0] * NUM_FOOTER, self.comm.size
        for flag, what in _FLAGS.items():
            num_flagged = round(footer[flag])
            if 0 < num_flagged < (round(footer[ACTIVE]) if flag == LOADED else size):
                who = f"{num_flagged} of {size} ranks each"
                if num_flagged == 1:
                    who = f"rank {round(footer[FLAGGED_RANKS]) - 1}"
                raise RankMismatchError(f"{self.comm.rank_label}: {who} {what}.")
        if self.buckets and footer[NUM_EXCHANGES] != self._sent_count * size:
            raise CommunicationError(
                f"{self.comm.rank_label}: the ranks are at different exchanges of gradients: this one "
                f"at number {self._sent_count}, all together at "
                f"{footer[NUM_EXCHANGES] / size:g} in the mean. Every rank must run backward() and "
                "step() equally often, or end its loop inside optimizer.join()."
            )

    def _await_agreement(self) -> None:
        """A sum of weights that failed must not be taken for one that went well."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.wait()

    @property
    def has_finite_gradients(self) -> bool:
        """Whether the gradients of all ranks were finite, after `await_footer`."""
        return float(self._footer[NONFINITE]) == 0

    def has_arrived(self, parameter: nn.Parameter) -> bool:
        """Whether `take` would not wait."""
        return all(
            chunk not in self._works or self._works[chunk].done
            for chunk in self.chunks_of[parameter]
        )

    def take(self, parameter: nn.Parameter, slot: Tensor) -> None:
        """Wait for the sum in the slot of one parameter and make it a mean, after `await_footer`.

        Once for each parameter and exchange; then not `wait`.
        """
        for chunk in self.chunks_of[parameter]:
            work = self._works.get(chunk)
            if work is not None:
                work.wait()
        if self._factor != 1.0:
            slot.mul_(self._factor)

    def nonfinite(self) -> NonfiniteGradients | None:
        """What was not finite in the sums that were waited for. *Collective*, and once only.

        It sends something only if there is something.
        """
        is_valid = self.is_finite
        here, self._nonfinite_here = self._nonfinite_here, []
        encoded, self._nonfinite_encoded = self._nonfinite_encoded, []
        decoded, self._nonfinite_decoded = self._nonfinite_decoded, []
        sums, self._sums = self._sums, []
        self._is_valid = True
        if is_valid:
            return None
        here += [name for name, total in sums if not torch.isfinite(total)]
        everybody = self.comm.allgather_obj((list(dict.fromkeys(here)), encoded, decoded))
        # Whoever encodes for a node meets what is not finite in others' gradients too, so it is
        # only asked if all gradients were finite: then narrowing them was too much.
        by_rank = {rank: own for rank, (own, _, _) in enumerate(everybody) if own}
        if not by_rank:
            by_rank = {rank: names for rank, (_, names, _) in enumerate(everybody) if names}
        in_sum = sorted({name for _, _, names in everybody for name in names})
        return NonfiniteGradients(self._step, by_rank, in_sum, self.what)

    @property
    def is_finite(self) -> bool:
        """Whether what was summed is finite on all ranks, after the sum was waited for."""
        return self._is_valid and float(self._footer[NONFINITE]) == 0

    @property
    def total_weight(self) -> float:
        """The weights of all ranks in the sum that was waited for."""
        return float(self._footer[WEIGHT])

    @property
    def num_samples(self) -> float:
        """The samples of all ranks behind the sum that was waited for, where they are counted."""
        return float(self._footer[SAMPLES])

    @property
    def num_active(self) -> int:
        """How many ranks took part with data of their own in the sum that was waited for."""
        return round(float(self._footer[ACTIVE]))

    @property
    def presence(self) -> list[bool]:
        """Whether any rank had a gradient, for every parameter of `order` (zero_fill off)."""
        return [flag != 0.0 for flag in self._footer[NUM_FOOTER:].tolist()]

    def means(self) -> dict[str, Tensor | None]:
        """A copy of the means by name, to be saved; None where no rank had a gradient."""
        copies: dict[str, Tensor | None] = {
            name: slot.clone()
            for bucket in self.buckets
            for name, slot in zip(bucket.names, bucket.slots, strict=True)
        }
        for name, is_present in zip(list(copies), self.presence, strict=False):
            if not is_present:
                copies[name] = None
        return copies

    def record(self) -> dict[str, Any]:
        """What is known of the sums that were waited for, beside their means: to be saved."""
        narrow = [name for name, total in self._sums if not torch.isfinite(total)]
        return {
            "step": self._step,
            "next_unit": self.next_unit,
            "is_finite": self.is_finite,
            "here": list(dict.fromkeys([*self._nonfinite_here, *narrow])),
            "encoded": self._nonfinite_encoded,
            "decoded": self._nonfinite_decoded,
        }

    def load_means(
        self, means: dict[str, Tensor | None], record: dict[str, Any] | None = None
    ) -> None:
        """Hold saved means, and their `record`. Raises UsageError: they are of other parameters."""
        names = [name for bucket in self.buckets for name in bucket.names]
        if set(names) != means.keys():
            odd = sorted(set(names) ^ means.keys())
            raise UsageError(
                f"The saved pending gradient is of other parameters; they differ in {odd[:5]}."
            )
        for bucket in self.buckets:
            for name, slot in zip(bucket.names, bucket.slots, strict=True):
                mean = means[name]
                slot.zero_() if mean is None else slot.copy_(mean)
        self._sums.clear()
        num_flags = self._footer.numel() - NUM_FOOTER
        presence = [means[name] is not None for name in names][:num_flags]
        self.write_footer(float(self.comm.size), is_active=True, presence=presence)
        self.next_unit = None
        self._holds_means = True
        if record is not None:
            self._step, self.next_unit = record["step"], record["next_unit"]
            self._is_valid = record["is_finite"]
            self._nonfinite_here = list(record["here"])
            self._nonfinite_encoded = list(record["encoded"])
            self._nonfinite_decoded = list(record["decoded"])
