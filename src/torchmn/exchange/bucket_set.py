"""The buckets of one exchange: packed, summed over ranks, and turned into means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchmn import events
from torchmn.comm import Communicator
from torchmn.comm.allreduce import AllReduceAlgorithm
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.footer import Footer
from torchmn.exchange.agreements.measured_norms import MeasuredNorms
from torchmn.exchange.agreements.presence import Presence
from torchmn.exchange.agreements.weights import WeightAgreement, weight_scale
from torchmn.exchange.buckets import Bucket, Slot
from torchmn.exchange.finiteness import NonfiniteGradients, sum_of
from torchmn.exchange.gradient_memory import in_use
from torchmn.exchange.gradient_norms import GradientNorms, squared_norms, total_of

Reduction = Literal["mean", "sum"]
"""How the ranks' gradients are combined."""
_NO_DATA = PassContext(step=0, weight=0.0, num_samples=0.0, is_active=False)


class BucketSet:
    """The buckets of one exchange and the sums under way in them.

    Gradients are packed as ``weight / (size * scale)`` times themselves and the footer holds the
    weight itself: with weights w_i the mean is the sum times ``size * scale / sum(w_i)``, and with
    ``reduction="sum"`` the sum of w_i g_i is the sum times ``size * scale``.

    The order of calls in one exchange: `begin`, `pack` for each slot, `write_footer`,
    `start_remaining` or `reduce_remaining`; then `wait` turns the sums into means. `restart` begins
    the next one.
    """

    def __init__(
        self,
        comm: Communicator,
        algorithm: AllReduceAlgorithm,
        buckets: list[Bucket],
        *,
        footer: Footer | None = None,
        what: str = "gradients",
        reduction: Reduction = "mean",
    ) -> None:
        self.comm = comm
        self.algorithm = algorithm
        self.buckets = buckets
        self.slot_of: dict[nn.Parameter, Slot] = {
            slot.parameter: slot for bucket in buckets for slot in bucket.slots
        }
        """In the order of the memory."""
        self.slots = list(self.slot_of.values())
        self.slot_at: list[Slot | None] = []
        """By the numbers of the parameters, see `number`."""
        self.what = what
        self.next_scale: float | None = 1.0
        """The `weight_scale` that suits the weights of this exchange."""
        self.sparse_means: dict[nn.Parameter, Tensor | None] = {}
        """Of parameters whose gradients are sparse, which are in no bucket."""
        self.context = _NO_DATA
        """What this rank contributes."""
        self._reduction = reduction
        self._route = comm.route
        self._overlaps_backward = self._route.overlaps_backward
        self._is_on_gpu = any(bucket.buffer.device.type != "cpu" for bucket in buckets)
        self.footer = footer or Footer(comm)
        """What ranks must have in common."""
        if buckets:
            self.footer.values = buckets[-1].exact
        self._weights, self.finiteness = self.footer.weights, self.footer.finite.finiteness
        self._norms = self.footer.find(MeasuredNorms)
        self._presence = self.footer.find(Presence)
        if self._presence is not None:
            self._presence.slots = self.slots
        self._scale = 1.0
        self._factor = 1.0
        self._holds_means = True
        self._agreement: WeightAgreement | None = None
        self._own_squares: list[Tensor] | None = None
        """Squared norms of what is packed; None if this exchange is not measured."""
        self.restart()

    @property
    def is_narrow(self) -> bool:
        """Whether values beyond float16's range would be lost on the way."""
        return self.algorithm.codec is not None or any(
            bucket.buffer.dtype == torch.float16 for bucket in self.buckets
        )

    def number(self, parameters: Sequence[nn.Parameter]) -> None:
        """Fill `slot_at`: by the position of a parameter among these. Local."""
        self.slot_at = [self.slot_of.get(parameter) for parameter in parameters]

    def warm_up(self) -> None:
        """Compile what the codec needs now, so that no step has to."""
        codec = self.algorithm.codec
        if codec is None or self.comm.size == 1:
            return
        layouts = {bucket.layout.dtype: bucket.layout for bucket in self.buckets}
        for layout in layouts.values():
            if layout.numel:
                codec.warm_up(layout, self.buckets[0].buffer.device)

    # ---- filling ----

    def restart(self) -> None:
        """Forget what was packed."""
        self.is_begun = False
        self.is_accumulating = False
        """Whether a gradient was added to the mean of an earlier exchange."""
        self._num_started = 0
        for slot in self.slots:
            slot.is_packed = slot.has_gradient = False
        for bucket in self.buckets:
            bucket.num_packed = 0
            bucket.waiting.clear()
            bucket.totals.clear()

    def begin(
        self, context: PassContext, scale: float | None, *, is_measured: bool = False
    ) -> None:
        """Begin an exchange. *Collective*; it waits for nothing.

        ``scale``: the `weight_scale`, the same on all ranks; None to agree on one, for which
        `await_scale` waits. The ranks' weights are summed first where that must come first.
        ``is_measured``: `norms` will be asked for.
        """
        self.context, self.is_begun = context, True
        self.footer.begin(context)
        self._own_squares = [] if is_measured else None
        self._leave_lent()
        codec = self.algorithm.codec
        if scale is None or (codec is not None and codec.keeps_residuals):
            self._agreement = WeightAgreement(
                self.comm,
                context.weight,
                is_active=context.is_active,
                scale=scale,
                then=self._ready,
            )
        if scale is not None:
            self._set_scale(scale)

    def _leave_lent(self) -> None:
        """Leave memory that a script still uses to it and continue in new memory. Local."""
        used = in_use(self.slots)
        for slot in self._move_to_new_memory(used) if used else ():
            grad = slot.parameter.grad
            if grad is not None:
                slot.tensor.copy_(grad)
                slot.lend()

    def _move_to_new_memory(self, slots: Sequence[Slot]) -> list[Slot]:
        """Move the buckets of these slots, and so all slots in them; every ``p.grad`` stays.

        Returns the moved slots whose tensor was ``p.grad``.
        """
        lent = []
        for bucket in dict.fromkeys(slot.bucket for slot in slots):
            lent += [slot for slot in bucket.slots if slot.parameter.grad is slot.tensor]
            new = torch.zeros_like(bucket.buffer).untyped_storage()
            for tensor in (
                bucket.buffer,
                *([self.footer.values] if bucket is self.buckets[-1] else []),
            ):
                tensor.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
            bucket.follow()
        return lent

    def await_scale(self, scale: float | None) -> float:
        """The `weight_scale` of this exchange; waits for the other ranks if ``scale`` is None."""
        if scale is None:
            scale = 1.0 if self._agreement is None else self._agreement.scale
            self._set_scale(scale)
        return scale

    def _set_scale(self, scale: float) -> None:
        self._scale = scale
        self._own_factor = self.context.weight / (self.comm.size * scale)

    def _ready(self, total_weight: float, scale: float) -> None:
        """After the sum of weights, before anything is encoded; inside of the engine's job."""
        factor = self._factor_of(total_weight, scale)
        if self.algorithm.codec is not None:
            self.algorithm.codec.begin(1 / factor if factor else 0.0)

    def pack(self, slot: Slot) -> None:
        """Write this rank's part of a gradient, zeros if there is none; send what is full.

        A small one is written when all of its bucket are there: in one go, and until then it must
        not be changed.
        """
        grad, tensor, bucket = slot.parameter.grad, slot.tensor, slot.weak_bucket()
        assert bucket is not None  # noqa: S101 - this set keeps it
        if tensor.data_ptr() != slot.address:
            tensor = slot.current_tensor()
        if grad is not None:
            if grad.requires_grad or grad.layout is not torch.strided:
                self._refuse(slot.name, grad)
            slot.has_gradient = True
            if grad is tensor:
                self.is_accumulating = True
        if grad is None or self._own_factor == 0.0:  # even NaN, times the weight 0, is nothing
            tensor.zero_()
        elif slot.is_small:
            if grad.data_ptr() != tensor.data_ptr():
                bucket.waiting.append((tensor, grad))
        else:
            if grad.data_ptr() != tensor.data_ptr():
                torch.mul(grad, self._own_factor, out=tensor)
            elif self._own_factor != 1.0:
                tensor.mul_(self._own_factor)
            if not self._is_on_gpu:
                bucket.totals.append(sum_of(tensor))
        slot.is_packed = True
        bucket.num_packed += 1
        if bucket.num_packed == len(bucket.slots):
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of a bucket are there: write the small ones, and send what is full."""
        if bucket.waiting:
            slots, grads = zip(*bucket.waiting, strict=True)
            torch._foreach_copy_(slots, grads)
            bucket.waiting.clear()
        if self._own_factor not in (0.0, 1.0) and bucket.runs:
            torch._foreach_mul_(bucket.runs, self._own_factor)
        if not self._is_on_gpu:
            for run in bucket.runs:
                bucket.totals.append(sum_of(run))
        self.finiteness.check(bucket)
        if self._own_squares is not None:
            for slot in bucket.slots:
                if slot.has_gradient and slot.end > slot.start:
                    self._own_squares.append(squared_norms(slot.values))
        for observer in events.observers:
            observer.exchange(self.comm, bucket, bucket.index, "ready")
        if self._overlaps_backward:
            self.start_full()

    def fill(
        self, context: PassContext, scale: float, write: Callable[[Slot, float], None]
    ) -> None:
        """Begin an exchange and write all of it. *Collective*, but does not wait.

        ``write`` writes what belongs into a slot, times the factor that it is given.
        """
        self.restart()
        self.begin(context, scale)
        for slot in self.slots:
            if self._own_factor == 0.0:  # nothing, even where the values are NaN
                slot.tensor.zero_()
            else:
                write(slot, self._own_factor)
            if not self._is_on_gpu:
                slot.bucket.totals.append(sum_of(slot.tensor))
        for bucket in self.buckets:
            self.finiteness.check(bucket)
        self.write_footer()

    def _refuse(self, name: str, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{self.comm.rank_label}: the gradient of '{name}' is sparse ({grad.layout}), and "
                "its layer is not one whose gradients are known to be: nn.Embedding and "
                "nn.EmbeddingBag with sparse=True. Use one of these, or dense gradients "
                "(sparse=False)."
            )
        raise UnsupportedError(
            f"{self.comm.rank_label}: backward(create_graph=True): every p.grad becomes a mean "
            "over ranks, which has no graph and cannot be differentiated again. For second "
            "derivatives use torch.autograd.grad(loss, parameters, create_graph=True)."
        )

    def write_footer(self) -> None:
        """Write what this rank contributes to the agreements."""
        if not self.buckets:
            return
        if self._norms is not None and self._own_squares is not None:
            is_own = not self.is_accumulating
            self._norms.measure(self._own_squares, self._own_factor, is_own=is_own)
        self.footer.write(self.context)

    # ---- sending ----

    def start_full(self) -> None:
        """Start the sums of buckets that are full, but for the last: no computation hides it."""
        for bucket in self.buckets[self._num_started : -1]:
            if bucket.num_packed < len(bucket.slots):
                return
            self._start(bucket)

    def start_remaining(self) -> None:
        """Start all other sums and return at once."""
        for bucket in self.buckets[self._num_started :]:
            self._start(bucket)

    def reduce_remaining(self) -> None:
        """Do all other sums, on the calling thread if nothing else is under way."""
        for bucket in self.buckets[self._num_started :]:
            self._route.sum_(
                bucket,
                self.algorithm,
                bucket=bucket.index,
                step=self.context.step,
                on_complete=self._next_callback(),
            )

    def send_nothing(self) -> None:
        """Do all other sums with zeros: an agreement of the footer says why."""
        held = [slot for slot in self.slots if slot.parameter.grad is slot.tensor]
        self._move_to_new_memory([slot for slot in held if slot.may_lend])
        for slot in held:
            if not slot.may_lend:  # memory that ranks share stays where it is
                slot.parameter.grad = slot.tensor.clone()
        for bucket in self.buckets[self._num_started :]:
            bucket.buffer.zero_()
        self.context = replace(self.context, weight=0.0, num_samples=0.0, is_active=False)
        self.write_footer()
        self.reduce_remaining()

    def _start(self, bucket: Bucket) -> None:
        bucket.work = self._route.start_sum_(
            bucket,
            self.algorithm,
            bucket=bucket.index,
            step=self.context.step,
            on_complete=self._next_callback(),
        )

    def _next_callback(self) -> Callable[[], None] | None:
        """What ends an exchange: after its last bucket, before anything else is encoded."""
        self._holds_means = False
        self._num_started += 1
        is_last = self._num_started == len(self.buckets)
        return self._finish if is_last and self.algorithm.codec is not None else None

    def _finish(self) -> None:
        codec = self.algorithm.codec
        if codec is None:
            return
        finiteness = self.finiteness
        finiteness.in_decoding = codec.nonfinite.names("decoding")
        finiteness.in_encoding = codec.nonfinite.names("encoding")
        is_decoded = bool(self._route.all_valid(not finiteness.in_decoding))
        # A sum that is thrown away has lost nothing, and what was added to it is still lost.
        finiteness.is_valid = is_decoded and self.footer.is_finite()
        codec.finish(is_valid=finiteness.is_valid and self.footer.is_used())

    # ---- what has arrived ----

    def drain(self) -> None:
        """Wait for all sums, whatever they are."""
        self._await_agreement()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self.footer.read()

    def await_bucket(self, bucket: Bucket) -> None:
        """Wait for the sum of one bucket, which `wait` has not made means yet."""
        if bucket.work is not None:
            bucket.work.wait()

    def wait(self) -> bool:
        """Wait for all sums and turn them into means; calling it again changes nothing.

        Returns whether sums were scaled. Raises UsageError on all ranks: the weights of the active
        ranks add up to zero, and no script has set one. If one has, the means are zeros.
        """
        self.drain()
        if self._holds_means:
            return False
        self._check_footer()
        if self._factor != 1.0:
            for bucket in self.buckets:
                bucket.buffer[: bucket.buffer.numel() - bucket.num_exact].mul_(self._factor)
        self._holds_means = True
        return self._factor != 1.0

    def _check_footer(self) -> None:
        total = self.total_weight
        self.next_scale = weight_scale(total, self.num_active) if total else self._scale
        self._factor = self._factor_of(total, self._scale)
        self.raise_if_ranks_disagree()

    def raise_if_ranks_disagree(self) -> None:
        """Raise or warn if the ranks do not agree, after the sums were awaited. Local."""
        if self.buckets:
            self.footer.check(self.context)

    def _factor_of(self, total: float, scale: float) -> float:
        """The factor that turns a sum into the mean, or into what else was asked for."""
        if total == 0.0:
            return 0.0
        return self.comm.size * scale / (1.0 if self._reduction == "sum" else total)

    def _await_agreement(self) -> None:
        """A sum of weights that failed must not be taken for one that succeeded."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.wait()

    @property
    def is_finite(self) -> bool:
        """Whether what was summed is finite on all ranks, after the sum was awaited."""
        return self.footer.finite.are_all_finite

    @property
    def total_weight(self) -> float:
        """The weights of all ranks in the sum that was awaited."""
        return self._weights.total

    @property
    def num_samples(self) -> float:
        """The samples of all ranks in the sum that was awaited, where they are counted."""
        return self._weights.num_samples

    @property
    def num_active(self) -> int:
        """The number of ranks that contributed data of their own to the sum that was awaited."""
        return self._weights.num_active

    @property
    def presence(self) -> list[bool]:
        """Whether any rank had a gradient, for every one of `slots` (zero_fill off)."""
        return [] if self._presence is None else self._presence.are_present

    def norms(self) -> GradientNorms | None:
        """Of the gradients and of the means that `wait` has made; None if not measured. Local."""
        total = self.total_weight
        if self._own_squares is None or self._norms is None or not total:
            return None
        own_square, own_noise, mean_noise = self._norms.sums
        squares = [squared_norms(slot.values) for slot in self.slots if slot.end > slot.start]
        return GradientNorms(
            step=self.context.step,
            num_samples=self.num_samples,
            own_square=own_square / total,
            mean_square=total_of(squares, self.footer.values.device).item(),
            own_noise=own_noise / total,
            mean_noise=mean_noise / total**2,
        )

    def nonfinite(self) -> NonfiniteGradients | None:
        """What was not finite in the sums that were awaited. *Collective*, and only once.

        Nothing is sent unless something was not finite.
        """
        is_finite, own = self.is_finite, self.finiteness
        names = None if is_finite else (own.here, own.in_encoding, own.in_decoding)
        own.clear()
        if names is None:
            return None
        gathered = self.comm.allgather_obj(names)
        # A rank that encodes for a node meets what is not finite in others' gradients too, so its
        # report counts only if all gradients were finite: then narrowing them was too much.
        by_rank = {rank: own for rank, (own, _, _) in enumerate(gathered) if own}
        if not by_rank:
            by_rank = {rank: names for rank, (_, names, _) in enumerate(gathered) if names}
        in_sum = sorted({name for _, _, names in gathered for name in names})
        return NonfiniteGradients(self.context.step, by_rank, in_sum, self.what)

    # ---- state ----

    def means(self) -> dict[str, Tensor | None]:
        """A copy of the means by name, to be saved; None where no rank had a gradient."""
        copies: dict[str, Tensor | None] = {slot.name: slot.tensor.clone() for slot in self.slots}
        for slot, is_present in zip(self.slots, self.presence, strict=False):
            if not is_present:
                copies[slot.name] = None
        return copies

    def record(self) -> dict[str, Any]:
        """What is known of the sums that were awaited, beside their means: to be saved."""
        return {
            "step": self.context.step,
            "next_scale": self.next_scale,
            "is_finite": self.is_finite,
            **self.finiteness.record(),
        }

    def load_means(
        self,
        means: dict[str, Tensor | None],
        record: dict[str, Any] | None = None,
        *,
        total_weight: float | None = None,
        sums: Mapping[Agreement, Sequence[float]] | None = None,
    ) -> None:
        """Hold saved means, their `record`, and sums of agreements.

        Raises UsageError: they are of other parameters.
        """
        names = [slot.name for slot in self.slots]
        if set(names) != means.keys():
            odd = sorted(set(names) ^ means.keys())
            raise UsageError(
                f"The saved pending gradient is of other parameters; they differ in {odd[:5]}."
            )
        self._leave_lent()
        self._own_squares = None
        for slot in self.slots:
            mean = means[slot.name]
            slot.tensor.zero_() if mean is None else slot.tensor.copy_(mean)
        record = record or {}
        self.finiteness.load(record)
        step = record.get("step", self.context.step)
        weight = float(self.comm.size) if total_weight is None else total_weight
        self.context = PassContext(step=step, weight=weight, num_samples=0.0, is_active=True)
        held: dict[Agreement, Sequence[float]] = {self._weights: (weight, 1.0, 0.0, 0.0)}
        if self._presence is not None:
            held[self._presence] = [float(means[name] is not None) for name in names]
        self.footer.hold(held | dict(sums or {}))
        self.next_scale = record.get("next_scale")
        self._holds_means = True
