"""Local updates: every rank trains alone for a block of samples; then all agree on new parameters.

With anchor a (the same bits on all ranks), parameters w_i of rank i, its n_i samples of the block:

    during a block:   w_i <- w_i - inner update(gradient of rank i)
    at its end:       d = sum_i n_i (a - w_i) / sum_i n_i,    N = sum_i n_i
                      a <- outer_step(a, d, N),    w_i <- a

d is the mean pseudo-gradient. The outer step distinguishes the schedules: `PeriodicAverage`,
`BlockMomentum`, `DiLoCo`. With W ranks, a rank's block ends at the step in which its samples since
the last block reach block_size / W. A block that ends before it is full (`flush`, loops of
different lengths, the first block of a fragment) takes a part of the outer step: see
`take_partial_step`.

Overlap (``overlap_steps=k``): at step t rank i contributes a - w_i(t) and continues; at t + k

    a <- outer_step(a, d, N),    w_i <- a + (w_i(t+k) - w_i(t))

so that changes made meanwhile belong to the next block. At most one exchange is pending: the next
one waits for it. With ``eager=True`` a rank continues from w_i(t) moved by the outer step for
d = 0, which all ranks know at t: the momentum of earlier blocks (see `outer_momentum`). Only the
mean of this block then arrives k steps late.

Fragments (``num_fragments=F``; Streaming DiLoCo, Douillard et al. 2025): the parameters are split
into F consecutive parts; part f is exchanged when (f + 1) / F of a block is full, so that the first
block of fragment f is shorter than all later ones. Each has its own anchor and count of samples.
Differences: the paper puts every F-th layer into a fragment and blends ``a`` with w_i(t+k); here
changes made meanwhile are kept entirely, and nothing is lost or counted twice.

Within nodes (``intra_node="every_step"``): the ranks of a node train as one worker, with the mean
of their gradients at every step, and blocks are exchanged between nodes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.comm import Communicator
from torchmn.comm.checksums import checksum
from torchmn.comm.codecs import Codec
from torchmn.exchange.agreements.weights import weight_scale
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import copy_state_from_rank
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.changed_parameters import ParameterSample
from torchmn.exchange.schedules.local_updates.fragments import (
    Fragment,
    FragmentSchedule,
    PseudoGradient,
    is_trained,
    new_codecs,
    raise_if_of_others,
    reset_momentum_,
    restart_where_not_finite_,
    split_into_fragments,
    trained_and_frozen,
)
from torchmn.exchange.schedules.local_updates.outer_momentum import (
    OuterState,
    take_partial_step,
)
from torchmn.exchange.schedules.local_updates.resharding import reshard_blocks
from torchmn.exchange.schedules.local_updates.within_node import IntraNodeAverage

IntraNode = Literal["every_step"]
DEFAULT_SAMPLES_PER_WORKER = 512
"""Samples of each worker in a block if no size is given: 16 steps with batches of 32."""


class LocalUpdateSchedule(Schedule):
    """The base class of local-update schedules. A subclass defines `outer_step`.

    Args:
        block_size: in samples over all workers; default: 512 per worker.
        overlap_steps: number of steps during which the exchange is pending; 0 waits for it.
        num_fragments: number of parts of the parameters, exchanged one after another.
        eager: with ``overlap_steps``, apply the momentum of the outer step before the exchange.
        intra_node: ``every_step`` averages gradients at every step among the ranks of a node.

    Every floating-point parameter that the optimizer trains is exchanged. Frozen ones are not,
    until they are unfrozen, on all ranks: the next step then ends the partial block. Buffers, such
    as the running statistics of batch normalization, stay local to each rank as they do under every
    other schedule: evaluation and checkpointing synchronize them. Raises UsageError: an argument is
    out of range.

    >>> from torchmn.exchange.schedules import DiLoCo, LocalUpdateSchedule
    >>> isinstance(DiLoCo(block_size=4096), LocalUpdateSchedule)
    True
    """

    name: str
    resets_momentum = False
    """Whether the inner optimizer's first moments are set to zero at the start of each block."""

    def __init__(
        self,
        block_size: float | None = None,
        *,
        overlap_steps: int = 0,
        num_fragments: int = 1,
        eager: bool = False,
        intra_node: IntraNode | None = None,
    ) -> None:
        if block_size is not None:
            _check("block_size", 0 < block_size < math.inf, block_size, "above 0")
        _check("overlap_steps", overlap_steps >= 0, overlap_steps, "0 or more")
        _check("num_fragments", num_fragments >= 1, num_fragments, "1 or more")
        _check("intra_node", intra_node in (None, "every_step"), intra_node, "'every_step' or None")
        self.block_size = block_size
        self.full_block_size: float
        """Samples over all workers in a full block: ``block_size``, or the default for them."""
        self.overlap_steps = overlap_steps
        self.num_fragments = num_fragments
        self.eager = eager
        self.intra_node = intra_node
        self.num_samples = 0.0
        """Samples over all workers in all exchanges so far. The same on all ranks."""
        self.anchors: dict[str, Tensor] = {}
        """The parameters at which the block began, by name. The same on all ranks."""
        self._node: IntraNodeAverage | None = None
        self._codec: Codec | None = None
        self._fragments: list[Fragment] = []
        self._order: FragmentSchedule
        self._pending: Fragment | None = None
        """The fragment whose exchange is pending."""
        self._has_anchors = self._are_anchors_verified = False
        self._num_missed_steps = 0
        """Number of steps of a warm-up that this rank missed, as it had left its loop."""
        self._known = ParameterSample([])
        """A sample of the parameters, taken when a model is about to load a state."""
        self._is_resumed = False
        """Whether no step was made since `load_state_dict`: a state that a model loads is then part
        of the same checkpoint."""

    @property
    def traits(self) -> Traits:
        """See `Schedule.traits`."""
        return Traits(
            name=self.name,
            num_sets=0,
            averages_gradients=False,
            has_own_steps=True,
            counts_samples=True,
            replica_consistency="per_block",
            is_within_block=self._is_within_block,
        )

    # ---- what a subclass defines ----

    @abstractmethod
    def outer_step(self, pseudo_gradients: Sequence[PseudoGradient], num_samples: float) -> None:
        """Move the anchors in place to where the next block begins. Local.

        The result must be identical on all ranks. ``num_samples`` is that of all ranks in this
        block of these parameters. Called with gradients disabled.
        """

    def partial_outer_step(self, pseudo_gradients: Sequence[PseudoGradient], part: float) -> None:
        """Make the outer step of a block of which only ``part``, above 0 and below 1, is full."""
        take_partial_step(pseudo_gradients, part, self._full_step, self.outer_state_tensors)

    def outer_state_tensors(self, pseudo_gradients: Sequence[PseudoGradient]) -> OuterState:
        """The floating-point tensors that `outer_step` changes besides the anchors."""
        return {}

    def on_anchors_created(self) -> None:
        """Called when all tensors of `anchors` exist. New ones have no values yet."""

    def outer_state_dict(self) -> dict[str, Any]:
        """Return the state of the outer step: tensors and numbers."""
        return {}

    def load_outer_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `outer_state_dict`; an empty dict starts from scratch."""

    # ---- the schedule ----

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`.

        Raises UsageError: a block has less than one sample per worker; UnsupportedError: the
        transport cannot make two exchanges at a time, which these options need.
        """
        super().attach(reducer, inner, models)
        comm, self._codec = reducer.comm, reducer.codec
        self.full_block_size = float(self.block_size or DEFAULT_SAMPLES_PER_WORKER * comm.size)
        if self.full_block_size < comm.size:
            raise UsageError(
                f"{comm.rank_label}: block_size={self.full_block_size:g} samples over all "
                f"workers is less than one for each of the {comm.size} workers. Make it larger."
            )
        if self.intra_node is not None:
            if self.overlap_steps and not _is_concurrent(comm):
                raise UnsupportedError(
                    f"{comm.rank_label}: intra_node='every_step' with overlap_steps="
                    f"{self.overlap_steps} needs two exchanges at a time, and MPI is called by one "
                    "thread at a time. Use overlap_steps=0, or another transport."
                )
            self._node = IntraNodeAverage(reducer, inner, models)
        self.rebuild()
        self.begin()

    def begin(self, num_missed_steps: int = 0) -> None:
        """Stop the exchange of gradients; the first block begins with the next step. *Collective.*

        ``num_missed_steps``: number of steps of the other ranks that this rank did not make. If
        there are any, it copies parameters and optimizer state before the first exchange.
        """
        self._num_missed_steps = num_missed_steps
        if self._node is not None:
            self._node.begin()
        else:
            self._reducer.suspend()

    def rebuild(self, also: Collection[str] = ()) -> None:
        # What was trained once is kept: ranks differ in it until the end of a block.
        known = {*self.anchors, *also}
        parameters, self._frozen = trained_and_frozen(self._exchange.trained(), known)
        self.anchors = {
            name: self.anchors.get(name, torch.empty_like(p, requires_grad=False))
            for name, p in parameters
        }
        self._known = ParameterSample(parameters)
        parts = split_into_fragments(parameters, self.num_fragments)
        codecs = new_codecs(self._codec, parts, self._fragments)
        size, num_workers = self.full_block_size, self._comm.size
        # A power of two: sums stay near the size of pseudo-gradients, and the bits of a mean do not
        # depend on it.
        scale = weight_scale(size / num_workers, 1)
        self._fragments = [
            Fragment(self._comm, codec, part, self.anchors, scale)
            for codec, part in zip(codecs, parts, strict=True)
        ]
        share = size * self._num_sharing / num_workers
        self._order = FragmentSchedule(self.num_fragments, share)
        self._has_anchors = self._are_anchors_verified = False
        self.on_anchors_created()

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`. Called only with ``intra_node``."""
        if self._node is not None:
            self._node.backward_ended()
            self._node.num_active = self._exchange.num_active
            self._count_samples(self._exchange.num_samples)

    def step(self, closure: Callable[[], float] | None) -> float | None:
        if any(map(is_trained, self._frozen)):
            self._exchange_more()
        if not self._reducer.is_active:
            self._exchange.num_active = self._step_without_data()
            return None
        self._take_anchors()
        if self._node is not None and self._reducer.is_needed:
            result = self._node.step(closure)
        else:
            result = self._step_inner(closure)
            own, parameters = self._contribution, self._exchange.parameters
            # The ranks of the model end their blocks together.
            (num_samples,) = parameters.mesh.means(own.num_samples)
            self._count_samples(num_samples, own.mean_samples)
        self._progress(self.overlap_steps)
        return result

    def _step_without_data(self) -> int:
        """Take part in a step of the other ranks. *Collective.*

        Changes that this rank has made contribute to the next block. Returns the number of ranks
        that had data.
        """
        node = self._node
        if node is not None and self._reducer.is_needed and not node.has_left:
            node.step(None)
            node.num_active = num_active = self._exchange.num_active
            self._count_samples(self._exchange.num_samples)
            self._take_anchors()
            if num_active:
                node.num_missed_steps += 1
                # The others may not have started theirs: a GradScaler may skip their step.
                self._progress(math.inf if _is_concurrent(self._comm) else 0)
                return num_active
            self._finish_exchange()
            node.leave([p for fragment in self._fragments for p in fragment.parameters])
        return self._exchange_without_data()

    def before_access(self, access: Literal["read", "load"]) -> None:
        """See `Schedule.before_access`."""
        is_within = self._has_anchors and not self._is_resumed
        if access == "load" and is_within and not self._known.is_noted:
            self._known.note()

    def flush(self) -> None:
        """See `Schedule.flush`. Ends the partial block of every fragment.

        Ranks may have made different numbers of steps: a rank that flushes takes part in the
        exchanges of the others until all ranks flush. Afterwards the script may change parameters,
        identically on all ranks, or load a state.
        """
        while self._exchange_without_data():
            pass
        # The next block begins with what the parameters then are, the same on all ranks.
        self._has_anchors = self._are_anchors_verified = False

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None

    def _exchange_more(self) -> None:
        """End the block, and exchange what was frozen until now in the next ones. *Collective.*

        Raises UnsupportedError: inside ``join()``, where a rank may have left its loop.
        """
        if self._contribution.is_joining:
            raise UnsupportedError(
                f"{self._comm.rank_label}: parameters were unfrozen inside of join(), and "
                f"{self.name} must end the block on all ranks before it exchanges them. Unfreeze "
                "them before join()."
            )
        self.flush()
        self.rebuild()

    # ---- blocks ----

    @property
    def _num_sharing(self) -> int:
        """The number of ranks that train as one worker together with this one, including it."""
        return 1 if self._node is None else self._node.num_ranks

    @property
    def _is_within_block(self) -> bool:
        """Whether ranks have trained alone; with overlap, always from the first step to `flush`."""
        if not self._fragments or self._comm.size == self._num_sharing:
            return False
        return self._pending is not None or any(each.num_samples for each in self._fragments)

    def _take_anchors(self) -> None:
        """Begin a block, unless one is under way. Called before its first step or exchange.

        Raises UsageError: a model has loaded a state inside a block.
        """
        self._is_resumed = False
        changed = self._known.changed()
        self._known.forget()
        if changed:
            raise UsageError(
                f"{self._comm.rank_label}: model.load_state_dict() has replaced parameters within "
                f"a block of local updates ({', '.join(changed[:3])}), and the outer step would "
                "take the difference for what was learned. Call optimizer.flush() on all ranks "
                "before you load a state: the next block then begins with it."
            )
        if not self._has_anchors:
            for fragment in self._fragments:
                fragment.take_anchors()
            self._has_anchors = True

    def _count_samples(self, num_samples: float, mean_samples: float | None = None) -> None:
        """Count samples that this worker has processed, identically on all ranks of a node.

        ``mean_samples``: the mean over workers, if all of them know it. Blocks then end on all of
        them in the same step, whatever number of samples each has.
        """
        for fragment in self._fragments:
            fragment.num_samples += num_samples
        self._order.count(num_samples if mean_samples is None else mean_samples)

    def _progress(self, overlap_steps: float) -> None:
        """After a step, finish the pending exchange if it is due, and start those that are due."""
        if self._pending is not None:
            self._pending.steps_left -= 1
            if self._pending.steps_left <= 0:
                self._finish_exchange()
        while self._order.take_due():
            self._start_exchange(overlap_steps, is_active=self._reducer.is_active)

    def _exchange_without_data(self) -> int:
        """Take part in one exchange of the other ranks. *Collective.*

        Returns the number of ranks that continue; if there is none, all partial blocks are ended.
        """
        self._take_anchors()
        num_active = self._start_exchange(0, is_active=False)
        if num_active == 0:
            for _ in self._fragments[1:]:
                self._start_exchange(0, is_active=False)
            self._order.restart()
            if self._node is not None:
                self._node.restart()
        return num_active

    def _start_exchange(self, overlap_steps: float, *, is_active: bool) -> int:
        """Exchange the next fragment. *Collective.*

        All ranks finish one exchange before they start the next, so that collectives are called in
        the same order, whatever the number of steps between them. Returns the number of ranks that
        continue, if there is no overlap.
        """
        self._finish_exchange()
        self._verify_anchors()
        fragment = self._fragments[self._order.advance()]
        weight, node = fragment.num_samples, self._node
        # Each rank of a node has counted the samples of all its ranks. One that missed steps has
        # outdated parameters and contributes nothing.
        if node is not None:
            weight = 0.0 if node.num_missed_steps else weight / max(1, node.num_active)
        fragment.pack(weight, is_active=is_active, step=self._reducer.step)
        self._pending = fragment
        if overlap_steps and self.eager:
            fragment.move(self._momentum(fragment.pseudo_gradients()))
        fragment.start(overlap_steps)
        if overlap_steps:
            return 1
        self._finish_exchange()
        return fragment.sums.num_active

    def _momentum(self, zeros: Sequence[PseudoGradient]) -> list[Tensor]:
        """The change of the anchors in the next outer step for pseudo-gradients of zero. Local."""
        if not self.outer_state_tensors(zeros):
            return []
        return take_partial_step(zeros, 0, self._full_step, self.outer_state_tensors)

    def _full_step(self, pseudo_gradients: Sequence[PseudoGradient]) -> None:
        self.outer_step(pseudo_gradients, self.full_block_size)

    def _finish_exchange(self) -> None:
        """Wait for the pending exchange, if there is one, and make the outer step. *Collective.*"""
        fragment, self._pending = self._pending, None
        if fragment is None:
            return
        sums = fragment.sums
        sums.drain()
        # Before the outer step: the anchors are the last values that are the same on all ranks.
        if self._exchange.record_nonfinite(sums) is not None:
            self._discard_block(fragment)
            return
        num_samples = sums.total_weight
        if num_samples:
            sums.wait()
            part = num_samples / self.full_block_size
            with torch.no_grad():
                if part < 1:
                    self.partial_outer_step(fragment.pseudo_gradients(), part)
                else:
                    self.outer_step(fragment.pseudo_gradients(), num_samples)
        if fragment is self._fragments[0]:
            self.num_samples += num_samples
        fragment.restart()
        if self.resets_momentum:
            reset_momentum_(self._inner.state, fragment.parameters)

    def _discard_block(self, fragment: Fragment) -> None:
        """Return to the anchors on all ranks, as the block was not finite on some rank."""
        fragment.reset_to_anchors()
        fragment.num_samples = 0.0
        reset_momentum_(self._inner.state, fragment.parameters)
        restart_where_not_finite_(self._inner.state, fragment.parameters)
        self._reducer.act_on_nonfinite()

    def _verify_anchors(self) -> None:
        """Check once, before the first exchange, that anchors are bit-identical. *Collective.*

        A rank that had left its loop in a warm-up copies the anchors of another rank. Raises
        RankMismatchError on all ranks: the anchors differ.
        """
        if self._are_anchors_verified:
            return
        self._are_anchors_verified = True
        anchors = list(self.anchors.values())
        all_ranks = self._comm.allgather_obj((self._num_missed_steps, checksum(anchors)))
        present = {rank: sum_ for rank, (missed, sum_) in enumerate(all_ranks) if missed == 0}
        if len(set(present.values())) > 1:
            raise RankMismatchError(
                f"{self._comm.rank_label}: the ranks started the block with different parameters "
                f"(checksums {present}). Between steps, change parameters identically on all "
                "ranks; with a GradScaler, clear gradients with optimizer.zero_grad(); save states "
                "where all ranks have processed the same number of samples, or after "
                "optimizer.flush()."
            )
        if len(present) < len(all_ranks):
            is_behind = self._num_missed_steps > 0
            copy_state_from_rank(
                self._comm, anchors, self._inner, min(present), is_behind=is_behind
            )
            if is_behind:
                for fragment in self._fragments:
                    fragment.reset_to_anchors()
            self._num_missed_steps = 0

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`. Different on each rank; waits for a pending exchange."""
        has_anchors = self._has_anchors
        return {
            "num_samples": self.num_samples,
            "anchors": {n: a.clone() for n, a in self.anchors.items()} if has_anchors else {},
            "outer": self.outer_state_dict(),
            "order": self._order.state_dict(),
            "num_sharing": self._node.num_active if self._node is not None else 1,
            "fragments": [
                fragment.state_dict(is_pending=fragment is self._pending, has_anchors=has_anchors)
                for fragment in self._fragments
            ],
        }

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding` and `reshard_blocks`."""
        return reshard_blocks(states, comm, num_sharing=self._num_sharing)

    def resume_warnings(self) -> list[str]:
        """See `MultiNodeOptimizer.resume_warnings`."""
        return [
            "Within a block, the new workers continue from the mean of the old workers' "
            "parameters, weighted by samples: the average at the end of the block is the same, but "
            "not the path to it."
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Raises UsageError: other parameters or fragments."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.sums.drain()  # the engine may still write its buckets, which are used again
        names = {name for part in state.get("fragments", ()) for name in part["names"]}
        if not names <= self.anchors.keys():  # some were unfrozen before it was saved
            self.rebuild(names)
        raise_if_of_others(state, len(self._fragments), self.anchors)
        self._known.forget()
        self._is_resumed = True
        node, fragments = self._node, self._fragments
        self._order.restart()
        self._are_anchors_verified, self._num_missed_steps = False, 0
        if node is not None:
            node.restart()
            node.num_active = state.get("num_sharing", 1)
        self.num_samples = state.get("num_samples", 0.0)
        self.load_outer_state_dict(state.get("outer", {}))
        for name, value in state.get("anchors", {}).items():
            self.anchors[name].copy_(value)
        self._has_anchors = bool(state.get("anchors"))
        if state:
            self._order.load_state_dict(state["order"])
        for index, fragment in enumerate(fragments):
            if fragment.load_state_dict(state["fragments"][index] if state else {}):
                self._pending = fragment


def _is_concurrent(comm: Communicator) -> bool:
    """Whether two communicators of a rank may exchange at the same time, unlike over MPI."""
    transport = comm.world.transport
    return transport.is_concurrent


def _check(name: str, is_right: bool, value: object, rule: str) -> None:
    if not is_right:
        raise UsageError(f"{name}={value!r} must be {rule}.")
