"""Every rank trains alone for a block of samples, then all agree where the next block begins.

With anchor a (the same bits on all ranks), parameters w_i of rank i, its n_i samples of the block:

    during a block:   w_i <- w_i - inner update(gradient of rank i)
    at its end:       d = sum_i n_i (a - w_i) / sum_i n_i,    N = sum_i n_i
                      a <- move(a, d, N),    w_i <- a

`move` is the recipe: `PeriodicAverage`, `BlockMomentum`, `DiLoCo`. A rank's block ends at the step
in which its samples since the last one reach block_size / W. A block that ends before it is full
(`flush`, uneven loops, the first one of a fragment) moves by a part of a full one: `partial_block`.

Overlap (``overlap_steps=k``): at step t rank i contributes a - w_i(t), and goes on; at t + k

    a <- move(a, d, N),    w_i <- a + (w_i(t+k) - w_i(t))

so that what was learned meanwhile belongs to the next block. One exchange is under way at a time:
the next one waits for it.

Fragments (``num_fragments=F``; Streaming DiLoCo, Douillard et al. 2025): the parameters are cut
into F consecutive parts; f is exchanged when (f + 1) / F of a block is full, so that the first
block of fragment f is that much shorter than all later ones. Each has its anchor and its count of
samples. Differences: the paper takes every F-th layer into a fragment and blends ``a`` with
w_i(t+k); here what was learned meanwhile is kept as a whole, and nothing is lost or counted twice.

Warm start (``distributed_after``): until so many samples over all workers every step in float32, as
`EveryStep` does; the anchor is taken behind it. CNTK trained redundantly on all data until then,
and took the anchor before. The count comes out of the exchanges, so that all ranks switch at one
step.

Inside the node (``inside_node="every_step"``): the ranks of a node train as one worker, with the
mean of their gradients at every step, and blocks are agreed between nodes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchmn.communicators import Communicator
from torchmn.communicators.checksums import checksum
from torchmn.compression import Codec
from torchmn.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.gradients.codec_state import codec_state, load_codec_state
from torchmn.gradients.reducer import GradientReducer
from torchmn.gradients.replicas import copy_state_from_rank
from torchmn.gradients.weights import weight_scale
from torchmn.schedules.base import ReplicaConsistency, Schedule
from torchmn.schedules.every_step import EveryStep
from torchmn.schedules.local_updates.fragment_order import FragmentSchedule
from torchmn.schedules.local_updates.fragments import (
    Fragment,
    Movement,
    cut_into_fragments,
    reset_smoothed_gradients_,
    with_means,
)
from torchmn.schedules.local_updates.partial_block import Remembered, move_part_
from torchmn.schedules.local_updates.resharding import reshard_blocks

InsideNode = Literal["every_step"]
DEFAULT_SAMPLES_PER_WORKER = 512
"""A block if no size is given: 16 steps with batches of 32."""


@dataclass
class _Pending:
    """An exchange under way."""

    fragment: Fragment
    steps_left: float
    starts: list[Tensor] | None
    """The parameters when it was started; None to begin again from the anchor."""


class BlockSchedule(Schedule):
    """What all schedules by blocks share. A recipe is a subclass that says `_move_`.

    Args:
        block_size: in samples over all workers; default: 512 per worker.
        distributed_after: samples over all workers until which every step is exchanged in float32.
        overlap_steps: steps behind which the exchange is hidden; 0 waits for it.
        num_fragments: into how many parts the parameters are cut, exchanged one after another.
        inside_node: ``every_step`` averages gradients at every step among the ranks of a node.

    Every parameter of the optimizer travels, frozen ones as well; to save their bytes leave them
    out of the optimizer. Buffers, such as the running statistics of batch normalization, stay each
    rank's own as they do under every other schedule: who evaluates or saves unifies them.
    """

    name: str
    num_sets = 0
    staleness_steps = 0
    counts_samples = True
    resets_smoothed_gradients = False
    """Whether the inner optimizer's smoothed gradients become zero where a new block begins."""
    _reducer: GradientReducer
    _inner: Optimizer
    _comm: Communicator

    def __init__(
        self,
        block_size: float | None = None,
        *,
        distributed_after: float = 0,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        inside_node: InsideNode | None = None,
    ) -> None:
        _check("block_size", block_size is None or 0 < block_size < math.inf, block_size, "above 0")
        _check(
            "distributed_after", 0 <= distributed_after < math.inf, distributed_after, "0 or more"
        )
        _check("overlap_steps", overlap_steps >= 0, overlap_steps, "0 or more")
        _check("num_fragments", num_fragments >= 1, num_fragments, "1 or more")
        _check(
            "inside_node", inside_node in (None, "every_step"), inside_node, "'every_step' or None"
        )
        self.block_size = block_size
        self.distributed_after = distributed_after
        self.overlap_steps = overlap_steps
        self.num_fragments = num_fragments
        self.inside_node = inside_node
        self.num_samples = 0.0
        """Samples over all workers that exchanges have told of. The same on all ranks."""
        self.anchors: dict[str, Tensor] = {}
        """Where the block began, by the parameter's name. The same on all ranks."""
        self.unit = 1.0
        """In which samples are counted as weights, see `BucketSet`."""
        self._node: Communicator | None = None
        self._every_step = EveryStep()
        self._codec: Codec | None = None
        self._fragments: list[Fragment] = []
        self._cadence = FragmentSchedule(num_fragments, math.inf)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.num_samples = 0.0
        self._cadence.restart()
        self._is_warm = self.distributed_after > 0
        self._is_last_warm_step = False
        """Whether p.grad is a mean over all ranks though the warm start has ended."""
        self._is_stepping = False
        self._has_anchors = False
        self._are_anchors_proven = False
        self._pending: _Pending | None = None
        self._num_sharing = 1
        """How many ranks hold the parameters of this worker: those of the node that have data."""
        self._num_missed = 0
        """Steps of its node in which this rank had left its loop."""
        self._num_missed_warm = 0
        self._has_node_left = False

    @abstractmethod
    def _move_(self, movements: Sequence[Movement], num_samples: float) -> None:
        """Move anchors to where the next block begins, in place. The same on all ranks.

        ``num_samples``: of all ranks, in this block of these parameters. Gradients are off.
        """

    def _move_part_(self, movements: Sequence[Movement], part: float) -> None:
        """The same for a block that ended when ``part`` of it was full, above 0 and below 1."""
        move_part_(
            movements,
            part,
            lambda scaled: self._move_(scaled, self._block_size),
            self._remembered,
        )

    def _remembered(self, movements: Sequence[Movement]) -> Remembered:
        """The floating-point tensors that `_move_` changes beside anchors, by any two names."""
        return {}

    def _anchors_laid_out(self) -> None:
        """`anchors` are complete, though without values; those from before are the same objects."""

    def _recipe_state(self) -> dict[str, Any]:
        """What the recipe remembers: tensors and numbers."""
        return {}

    def _load_recipe_state(self, state: dict[str, Any]) -> None:
        """Go on from `_recipe_state`; an empty dict starts anew."""

    # ---- the protocol ----

    @property
    def replica_consistency(self) -> ReplicaConsistency:
        """See `Schedule.replica_consistency`. A warm start is as every other step."""
        return "per_step" if self._is_warm else "per_block"

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        self._reducer, self._inner = reducer, inner
        self._comm, self._codec = reducer.comm, reducer.codec
        self._every_step.attach(reducer, inner)
        size = self._comm.size
        self._block_size = self.block_size or DEFAULT_SAMPLES_PER_WORKER * size
        if self._block_size < size:
            raise UsageError(
                f"{self._comm.rank_label}: block_size={self._block_size:g} samples over all workers "
                f"leaves less than one for each of the {size} workers. Make it larger."
            )
        if self.inside_node is not None:
            self._connect_node()
        num_ranks = self._node.size if self._node is not None else 1
        self._cadence.share = self._block_size * num_ranks / size
        self.rebuild()
        self._aim_exchange()

    def _connect_node(self) -> None:
        comm = self._comm
        if self.overlap_steps and not _is_concurrent(comm):
            raise UnsupportedError(
                f"{comm.rank_label}: inside_node='every_step' with overlap_steps="
                f"{self.overlap_steps} needs two exchanges at a time, and MPI is called by one "
                "thread at a time. Use overlap_steps=0, or another transport."
            )
        self._node = comm.split(comm.inter_rank, comm.intra_rank)

    def _aim_exchange(self) -> None:
        """Point the exchange of gradients to where this phase needs it. *Collective.*"""
        if self._is_warm:
            self._reducer.reconfigure(self._comm, None)
        elif self._node is not None:
            self._reducer.reconfigure(self._node, None)
        else:
            self._reducer.suspend()

    def rebuild(self) -> None:
        """See `Schedule.rebuild`."""
        parameters = with_means(self._reducer.parameters())
        self.anchors = {
            name: self.anchors.get(name, torch.empty_like(p, requires_grad=False))
            for name, p in parameters
        }
        # A power of two: sums stay near the size of the movements, and no bit of a mean changes.
        self.unit = weight_scale(self._block_size / self._comm.size, 1)
        self._fragments = [
            Fragment(self._comm, codec, part, self.anchors, self.unit)
            for codec, part in zip(
                self._new_codecs(),
                cut_into_fragments(parameters, self.num_fragments),
                strict=True,
            )
        ]
        self._cadence.restart()
        self._has_anchors = self._are_anchors_proven = False
        self._anchors_laid_out()

    def _new_codecs(self) -> list[Codec | None]:
        """One for each fragment, whose exchanges end by themselves; what is owed moves along."""
        if self._codec is None:
            return [None] * self.num_fragments
        owed = [fragment.codec.state_dict() for fragment in self._fragments if fragment.codec]
        codecs = [self._codec.fresh() for _ in range(self.num_fragments)]
        if owed:
            for codec in codecs:  # each takes what is of its parameters
                codec.load_state_dict(_merged(owed))
        return list(codecs)

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`. Only while gradients travel."""
        self._every_step.backward_ended()
        self._count_exchange()

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if self._is_warm or self._is_last_warm_step:
            return self._warm_step(closure)
        self._take_anchors()
        result = self._inner_step(closure)
        if not self._reducer.is_needed:
            self._count_samples(self._reducer.contribution.num_samples)
        self._progress(self.overlap_steps)
        return result

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`. What a rank has learned goes into the next block that ends."""
        if self._reducer.is_needed and not self._has_node_left:
            num_active = self._every_step.shadow_step()
            self._count_exchange()
            if num_active:
                return self._followed(num_active)
            self._is_last_warm_step = False
            if self._is_warm:
                self._num_missed_warm = 0  # the optimizer sees to it
                return 0
            self._join_node()
        elif self._is_warm:
            return 0
        return self._exchange_stopped()

    def on_zero_grad(self) -> None:
        """See `Schedule.on_zero_grad`."""
        self._every_step.on_zero_grad()
        self._is_last_warm_step = False

    def flush(self) -> None:
        """See `Schedule.flush`. Ends the partial block of every fragment.

        Ranks may have made different numbers of steps: who flushes takes part in the blocks of the
        others until all do.
        """
        self._is_last_warm_step = False
        while not self._is_warm and self._exchange_stopped():
            pass

    def close(self) -> None:
        """See `Schedule.close`."""
        if self._node is not None:
            self._node.finalize()
            self._node = None

    # ---- warm start ----

    def _warm_step(self, closure: Callable[[], float] | None) -> float | None:
        self._is_stepping = True
        try:
            result = self._inner_step(closure)
        finally:
            self._is_stepping = False
        self._is_last_warm_step = False
        if self._is_warm:
            if not self._reducer.is_needed:  # one rank alone
                self.num_samples += self._reducer.contribution.num_samples
            if self.num_samples >= self.distributed_after:
                self._end_warm_start()
        return result

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        if self._reducer.is_needed:
            return self._every_step.step(closure)
        return self._inner.step(closure)

    def _count_exchange(self) -> None:
        """Note the samples of the exchange of gradients that just ended."""
        every_step = self._every_step
        if not self._is_warm:
            self._num_sharing = every_step.num_active
            self._count_samples(every_step.num_samples)
            return
        self.num_samples += every_step.num_samples
        # Inside of step() its end does it: a closure may be called again.
        if self.num_samples >= self.distributed_after and not self._is_stepping:
            self._end_warm_start()
            self._is_last_warm_step = True

    def _end_warm_start(self) -> None:
        # Here and not in step(), which a GradScaler may leave out: ranks that have left their loops
        # must switch as well. The anchors are taken when the first step of a block begins.
        self._is_warm = False
        self._aim_exchange()

    # ---- blocks ----

    def _take_anchors(self) -> None:
        if not self._has_anchors:
            for fragment in self._fragments:
                fragment.take_anchors()
            self._has_anchors = True

    def _count_samples(self, num_samples: float) -> None:
        """This worker has seen samples. On all ranks of a node alike, whether they step or not."""
        for fragment in self._fragments:
            fragment.num_samples += num_samples
        self._cadence.count(num_samples)

    def _progress(self, overlap_steps: float) -> None:
        """A step has ended: begin from new anchors that have arrived, exchange what is full."""
        if self._pending is not None:
            self._pending.steps_left -= 1
            if self._pending.steps_left <= 0:
                self._complete()
        while self._cadence.take_due():
            self._exchange_next(overlap_steps, is_active=self._reducer.is_active)

    def _exchange_stopped(self) -> int:
        """Take part in one exchange of others; if there are none, agree on what is left.

        Returns how many ranks go on.
        """
        self._take_anchors()
        num_active = self._exchange_next(0, is_active=False)
        if num_active == 0:
            for _ in self._fragments[1:]:
                self._exchange_next(0, is_active=False)
            self._close_cycle()
        return num_active

    def _exchange_next(self, overlap_steps: float, *, is_active: bool) -> int:
        """Exchange the next fragment. If it has waited, it returns how many ranks go on.

        All ranks end one exchange before they start the next, so that collectives come in one order
        whatever the number of steps between.
        """
        self._complete()
        self._prove_anchors()
        fragment = self._fragments[self._cadence.advance()]
        weight = 0.0 if self._num_missed else fragment.num_samples / max(1, self._num_sharing)
        fragment.pack(weight, is_active=is_active, step=self._reducer.step)
        fragment.num_samples = 0.0
        starts = fragment.copies() if overlap_steps else None
        self._pending = _Pending(fragment, overlap_steps, starts)
        fragment.movements.start_remaining()
        if overlap_steps:
            return 1
        self._complete()
        return fragment.movements.num_active

    def _complete(self) -> None:
        """Wait for the exchange under way and go on from where it leads."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        fragment, movements = pending.fragment, pending.fragment.movements
        movements.drain()
        if self._reducer.record_nonfinite(movements) is not None:
            self._abandon(fragment)
            return
        num_samples = movements.total_weight
        if num_samples:
            movements.wait()
            part = num_samples / self._block_size
            with torch.no_grad():
                if part < 1:
                    self._move_part_(fragment.means(), part)
                else:
                    self._move_(fragment.means(), num_samples)
        if fragment is self._fragments[0]:
            self.num_samples += num_samples
        fragment.restart(pending.starts)
        if self.resets_smoothed_gradients:
            self._reset_smoothed_gradients(fragment)

    def _abandon(self, fragment: Fragment) -> None:
        """Somewhere the block was not finite: all go back to its beginning."""
        fragment.restart(None)
        fragment.num_samples = 0.0
        self._reset_smoothed_gradients(fragment)
        self._reducer.act_on_nonfinite()

    def _reset_smoothed_gradients(self, fragment: Fragment) -> None:
        reset_smoothed_gradients_(self._inner.state, fragment.parameters)

    def _close_cycle(self) -> None:
        self._cadence.restart()
        self._has_node_left, self._num_missed = False, 0

    # ---- ranks that have left their loops ----

    def _followed(self, num_active: int) -> int:
        """An exchange of gradients that this rank has only followed. Returns ``num_active``."""
        if self._is_warm or self._is_last_warm_step:
            self._num_missed_warm += 1
            self._is_last_warm_step = False
            return num_active
        self._take_anchors()
        self._num_missed += 1
        # The others of the node may not be there yet: a GradScaler has left out their step, say.
        self._progress(math.inf if _is_concurrent(self._comm) else 0)
        return num_active

    def _join_node(self) -> None:
        """All of the node have left: take over from one that ran to the end. *In the node.*"""
        self._has_node_left = True
        self._take_anchors()
        self._complete()
        if self._node is None:
            return
        everybody = self._node.allgather_obj(self._num_missed)
        if any(everybody):
            source = next(rank for rank, num in enumerate(everybody) if num == 0)
            parameters = [p for fragment in self._fragments for p in fragment.parameters]
            copy_state_from_rank(self._node, parameters, self._inner, source)
        self._num_missed, self._num_sharing = 0, self._node.size

    def _prove_anchors(self) -> None:
        """Once, before the first exchange: all ranks set out from the same bits. *Collective.*

        A rank that left its loop in the warm start takes over what the others have.
        """
        if self._are_anchors_proven:
            return
        self._are_anchors_proven = True
        anchors = list(self.anchors.values())
        everybody = self._comm.allgather_obj((self._num_missed_warm, checksum(anchors)))
        present = {rank: sum_ for rank, (missed, sum_) in enumerate(everybody) if missed == 0}
        if len(set(present.values())) > 1:
            raise RankMismatchError(
                f"{self._comm.rank_label}: the ranks set out from different parameters (checksums "
                f"{present}). Between steps parameters may be changed only on all ranks alike; "
                "with a GradScaler clear gradients by optimizer.zero_grad(); states must be saved "
                "where all ranks have seen equally many samples, or after optimizer.flush()."
            )
        if len(present) < len(everybody):
            is_behind = self._num_missed_warm > 0
            copy_state_from_rank(
                self._comm, anchors, self._inner, min(present), is_behind=is_behind
            )
            if is_behind:
                for fragment in self._fragments:
                    fragment.restart(None)
            self._num_missed_warm = 0

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`. Each rank has its own; it waits for what is under way."""
        return {
            "num_samples": self.num_samples,
            "is_warm": self._is_warm,
            "anchors": {n: a.clone() for n, a in self.anchors.items()} if self._has_anchors else {},
            "recipe": self._recipe_state(),
            "block_samples": [fragment.num_samples for fragment in self._fragments],
            "cadence": self._cadence.state_dict(),
            "num_sharing": self._num_sharing,
            "pending": self._pending_state(),
            "codecs": [codec_state(fragment.codec, self._comm) for fragment in self._fragments],
            "names": [fragment.names for fragment in self._fragments],
            "parameters": self._parameters_off_anchors(),
        }

    def _parameters_off_anchors(self) -> dict[str, Tensor]:
        """What this rank has learned in the block: another number of ranks shares it out."""
        if not self._has_anchors:
            return {}
        return {
            name: parameter.detach().clone()
            for fragment in self._fragments
            for name, parameter in zip(fragment.names, fragment.parameters, strict=True)
            if not torch.equal(parameter, self.anchors[name])
        }

    def _pending_state(self) -> dict[str, Any]:
        pending = self._pending
        if pending is None:
            return {}
        fragment, movements = pending.fragment, pending.fragment.movements
        movements.drain()
        total_weight = movements.total_weight
        if total_weight:
            movements.wait()
        starts = pending.starts
        return {
            "fragment": self._fragments.index(fragment),
            "steps_left": pending.steps_left,
            "starts": None if starts is None else [start.clone() for start in starts],
            "means": movements.means(),
            "total_weight": total_weight,
            "record": movements.record(),
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding` and `reshard_blocks`."""
        return reshard_blocks(states, comm, num_sharing=self._node.size if self._node else 1)

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        return [
            "In the middle of a block the new workers go on from the mean of the old ones' "
            "parameters, weighted by samples: what is averaged at its end is the same, but not the "
            "path until there."
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Raises UsageError: of other parameters or fragments."""
        if self._pending is not None:
            self._pending.fragment.movements.drain()  # its memory is used again
        self._check_state(state)
        was_warm = self._is_warm
        self._begin_anew()
        self._every_step.on_zero_grad()
        for fragment in self._fragments:
            fragment.num_samples = 0.0
        self._load_recipe_state(state.get("recipe", {}))
        codecs = state.get("codecs", [{}] * len(self._fragments))
        for fragment, codec in zip(self._fragments, codecs, strict=True):
            load_codec_state(fragment.codec, self._comm, codec)
        if state:
            self.num_samples, self._is_warm = state["num_samples"], state["is_warm"]
            self._cadence.load_state_dict(state["cadence"])
            self._num_sharing = state["num_sharing"]
            for fragment, num_samples in zip(self._fragments, state["block_samples"], strict=True):
                fragment.num_samples = num_samples
            for name, value in state["anchors"].items():
                self.anchors[name].copy_(value)
            self._has_anchors = bool(state["anchors"])
            self._load_parameters(state.get("parameters", {}))
            self._load_pending(state["pending"])
        if was_warm is not self._is_warm:
            self._aim_exchange()

    def _check_state(self, state: dict[str, Any]) -> None:
        num_fragments = len(state.get("block_samples", self._fragments))
        if num_fragments != len(self._fragments):
            raise UsageError(
                f"This state was saved with num_fragments={num_fragments}, and here it is "
                f"{len(self._fragments)}. Use the same number."
            )
        saved = state.get("anchors") or self.anchors
        if saved.keys() != self.anchors.keys():
            odd = sorted(saved.keys() ^ self.anchors.keys())
            raise UsageError(
                f"The saved anchors are of other parameters; they differ in {odd[:5]}."
            )

    @torch.no_grad()
    def _load_parameters(self, values: dict[str, Tensor]) -> None:
        """On as many ranks as before they are the model's own; on others they take their place."""
        for fragment in self._fragments:
            for name, parameter in zip(fragment.names, fragment.parameters, strict=True):
                if name in values:
                    parameter.copy_(values[name])

    def _load_pending(self, state: dict[str, Any]) -> None:
        if not state:
            return
        fragment = self._fragments[state["fragment"]]
        fragment.movements.load_means(
            state["means"], state["record"], total_weight=state["total_weight"]
        )
        starts = state["starts"]
        if starts is not None:
            starts = [
                start.to(parameter.device, copy=True)
                for start, parameter in zip(starts, fragment.parameters, strict=True)
            ]
        self._pending = _Pending(fragment, state["steps_left"], starts)


def _is_concurrent(comm: Communicator) -> bool:
    """Whether two communicators of a rank may exchange at the same time."""
    return comm.world.transport.is_concurrent


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of codecs of different parameters as one: all their residuals."""
    merged = dict(states[0])
    for state in states[1:]:
        for key, value in state.items():
            if isinstance(value, list):
                merged[key] = [*merged[key], *value]
            elif isinstance(value, dict):
                merged[key] = {**merged[key], **value}
    return merged


def _check(name: str, is_right: bool, value: object, rule: str) -> None:
    if not is_right:
        raise UsageError(f"{name}={value!r} must be {rule}.")
