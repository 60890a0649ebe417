"""Gradients that are not finite: how they are found during an exchange, and what is done then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchmn.base import events
from torchmn.base.errors import NonFiniteGradientError, ResultWarning
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.comm.codecs.base import FoundNonfinite, When
from torchmn.comm.streams import Deferred
from torchmn.exchange.buckets import Bucket, Slot

if TYPE_CHECKING:
    from torchmn.exchange.reducer import GradientReducer

_NARROW = (torch.float16, torch.bfloat16)


def sum_of(written: Tensor) -> Tensor:
    """The sum of a CPU tensor, which is finite only if all elements are. Local.

    Compute it straight after the elements were written: while they are in the cache it costs a
    fifth of the writing.
    """
    return written.sum(dtype=torch.float32) if written.dtype in _NARROW else written.sum()


class Finiteness:
    """What this rank knows about nonfinite values in one exchange. Every method is local."""

    def __init__(self) -> None:
        self._is_valid: bool | Deferred = True
        self._names: dict[When, list[str]] = {}
        self._found: FoundNonfinite | None = None
        self.found_here: list[str] = []
        """Names of gradients on a CPU that are not finite."""
        self.on_device: list[tuple[Slot, Tensor]] = []
        """Slots on a GPU with their largest magnitude, which the host has not read."""

    def check(self, bucket: Bucket) -> None:
        """Check the values of a bucket that is completely written, before it is sent."""
        totals = bucket.totals
        if bucket.buffer.device.type != "cpu":
            slots = [slot for slot in bucket.slots if slot.end > slot.start]
            if slots:
                # One call for many slots. The host reads these norms only if the sum of all ranks'
                # counts shows that something is not finite.
                norms = torch._foreach_norm([slot.tensor for slot in slots], float("inf"))
                self.on_device += zip(slots, norms, strict=True)
        elif totals:
            total = 0.0
            for each in totals:
                total += each.item()
            # Only now look at each element: finite values too can overflow in their sum.
            if not math.isfinite(abs(total)):
                self.found_here += [
                    slot.name for slot in bucket.slots if not torch.isfinite(slot.tensor).all()
                ]
        totals.clear()

    def count(self, device: torch.device) -> Tensor | float:
        """Number of gradients of this rank that are not finite, without waiting for a GPU.

        If any are on a GPU the result is a tensor, (), on ``device``.
        """
        count: Tensor | float = float(len(self.found_here))
        for norms in self._norms():
            count = count + (~torch.isfinite(norms)).sum().to(device)
        return count

    def _norms(self) -> list[Tensor]:
        """The magnitudes, one tensor for each dtype and device.

        They are not converted to one dtype: a finite float64 may be infinite in float32.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for _, norm in self.on_device:
            kinds.setdefault((norm.dtype, norm.device), []).append(norm)
        return [torch.stack(norms) for norms in kinds.values()]

    def exchanged(self, found: FoundNonfinite, is_valid: bool | Deferred) -> None:
        """Note the nonfinite values that a codec found in the exchange. Called by the engine."""
        self._found, self._is_valid = found, is_valid

    @property
    def is_valid(self) -> bool:
        """Whether all values that a codec exchanged were finite on all ranks."""
        if isinstance(self._is_valid, Deferred):
            self._is_valid = bool(self._is_valid.get())
        return self._is_valid

    def names(self, when: When) -> list[str]:
        """Names of parameters of which a codec encoded or decoded nonfinite values."""
        return self._names.get(when, []) if self._found is None else self._found.names(when)

    def clear(self) -> None:
        """Forget everything that was found."""
        self._is_valid, self._found, self._names = True, None, {}
        self.found_here, self.on_device = [], []

    @property
    def here(self) -> list[str]:
        """Names of this rank's gradients that are not finite; waits for a GPU."""
        names = list(self.found_here)
        names += [slot.name for slot, norm in self.on_device if not torch.isfinite(norm)]
        return list(dict.fromkeys(names))

    def record(self) -> dict[str, list[str]]:
        """The names found so far, to be saved."""
        return {
            "here": self.here,
            "encoded": self.names("encoding"),
            "decoded": self.names("decoding"),
        }

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from a `record`, which may also hold ``is_finite``."""
        self.clear()
        self._is_valid = record.get("is_finite", True)
        self.found_here = list(record.get("here", ()))
        self._names = {
            "encoding": list(record.get("encoded", ())),
            "decoding": list(record.get("decoded", ())),
        }


@dataclass(frozen=True)
class NonfiniteGradients:
    """Gradients of a step, or pseudo-gradients of a block, that were not finite.

    The same on all ranks that hold the same part of the model.
    """

    step: int
    by_rank: dict[int, list[str]] = field(default_factory=dict)
    """Names of parameters, by the rank whose gradient was not finite; empty if only the sum
    overflowed."""
    in_sum: list[str] = field(default_factory=list)
    """Names of parameters whose sum was not finite when it was decoded."""
    what: str = "gradients"
    is_elsewhere: bool = False
    """Whether all of them belong to parts of the model that other ranks hold."""

    def __str__(self) -> str:
        ranks = "; ".join(
            f"rank {rank}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for rank, names in self.by_rank.items()
        )
        if self.is_elsewhere:
            held = f"{self.what} of a part of the model that another rank holds"
            return f"at step {self.step} {held} were not finite"
        return f"at step {self.step} {self.what} were not finite ({ranks or 'in the sum only'})"


def gather_nonfinite(
    comm: Communicator,
    step: int,
    here: list[str],
    encoded: list[str],
    decoded: list[str],
    *,
    what: str = "gradients",
) -> NonfiniteGradients:
    """Combine the nonfinite gradients that the ranks found in one step. *Collective.*

    Args:
        comm: the ranks.
        step: the number of the step.
        here: names of this rank's gradients that were not finite.
        encoded: names of parameters of which this rank's codec encoded nonfinite values.
        decoded: names of parameters of which it decoded nonfinite values.
        what: the kind of values that were exchanged, for messages.
    """
    gathered = comm.allgather_obj((here, encoded, decoded))
    # A rank that encodes for its node also meets nonfinite values of other ranks' gradients. So its
    # report counts only if all gradients were finite: then encoding has overflowed.
    by_rank = {rank: own for rank, (own, _, _) in enumerate(gathered) if own}
    if not by_rank:
        by_rank = {rank: names for rank, (_, names, _) in enumerate(gathered) if names}
    in_sum = sorted({name for _, _, names in gathered for name in names})
    return NonfiniteGradients(step, by_rank, in_sum, what)


class NonfiniteLog:
    """The nonfinite gradients of all steps so far, and of the current means."""

    def __init__(self) -> None:
        self.current: NonfiniteGradients | None = None
        """The problem of the current means; None if there is none, or it was dealt with."""
        self.problems: list[NonfiniteGradients] = []

    def record(self, problem: NonfiniteGradients | None) -> NonfiniteGradients | None:
        """Set the problem of the current means, and return it."""
        self.current = problem
        if problem is not None:
            self.problems.append(problem)
        return problem

    @property
    def is_hopeless(self) -> bool:
        """Whether so many consecutive steps were not finite that training makes no progress."""
        return self._num_in_a_row() == MAX_IN_A_ROW

    def _num_in_a_row(self) -> int:
        """Number of consecutive steps with a problem, up to the last problem."""
        count = 0
        for newer, older in zip(self.problems[::-1], self.problems[-2::-1], strict=False):
            if newer.step - older.step > 1:
                break
            count += 1
        return count + 1 if self.problems else 0

    def take(self) -> NonfiniteGradients | None:
        """Return the problem of the current means, and mark it as dealt with."""
        problem, self.current = self.current, None
        return problem


TAKEN = (
    "The host has learned this one step late, for it does not wait for a GPU: the parameters have "
    "taken the step. Continue from a checkpoint, or go on if the optimizer can recover."
)
OnNonfinite = Literal["raise", "warn", "ignore"]
MAX_IN_A_ROW = 100
"""After this many consecutive errors a script that catches them no longer trains."""


@dataclass(frozen=True)
class ArrivingFlags:
    """Flags on the way from a GPU that tell which gradients of a step are finite."""

    step: int
    names: list[str]
    flags: Deferred

    def found(self) -> NonfiniteGradients | None:
        """Return the gradients that were not finite, None if all were. Waits for the flags."""
        are_finite = self.flags.get().tolist()
        names = [name for name, flag in zip(self.names, are_finite, strict=True) if not flag]
        return NonfiniteGradients(self.step, {0: names}) if names else None


def record_own_nonfinite(reducer: GradientReducer) -> None:
    """Check the gradients of a single rank, which exchanges nothing.

    Local; *collective over the ranks of the model* where it is sharded. On a GPU the host does not
    wait for the result: the next step raises the error.
    """
    engine, exchange = reducer.comm.engine, reducer.exchange
    streams = engine.streams
    if streams.is_capturing():  # a replayed graph leaves out the host
        return
    reducer.settle()
    by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, parameter in reducer.parameters.trained():
        if (grad := parameter.grad) is not None and grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), {})[name] = grad.detach().to_dense()
    flags = [  # one kernel looks at many gradients
        torch.isfinite(torch.stack(torch._foreach_norm([*grads.values()], float("inf"))))
        for grads in by_kind.values()
    ] or [torch.ones(0, device="cpu")]
    names = [name for grads in by_kind.values() for name in grads]
    whole = torch.cat([each.to(flags[0].device) for each in flags])
    found = ArrivingFlags(reducer.step, names, engine.fetch(whole))
    if streams.is_host:
        exchange.record_problem(found.found(), found.step)
    else:
        exchange.own_flags = found


def act_on_nonfinite(reducer: GradientReducer, policy: OnNonfinite) -> None:
    """Raise NonFiniteGradientError, or warn, if the current means are not finite. Local.

    Each problem is reported once.
    """
    exchange = reducer.exchange
    exchange.note_step()
    problem = exchange.nonfinite.take()
    if problem is None or policy == "ignore":
        return
    text = (
        f"{reducer.comm.rank_label}: {problem}. Lower the learning rate, clip (max_grad_norm=), or "
        "scale the loss with torch.amp.GradScaler; with on_nonfinite='warn' or 'ignore' training "
        "continues."
    )
    if exchange.was_applied:
        text += f" {TAKEN}"
    if policy == "raise":
        error = NonFiniteGradientError(text)
        if exchange.nonfinite.is_hopeless:
            for observer in events.observers:
                observer.failed(error)
        raise error
    warn(text, ResultWarning)
