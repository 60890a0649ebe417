"""The reducer: sums gradients over ranks while backward still runs.

Hooks copy each gradient into its bucket as soon as it is final, and a full bucket is handed to the
communicator's engine; hooks never block. Buckets are sent in one order, the same on all ranks, so
one that is full early waits for those before it. At the end of backward a callback packs what had
no gradient and calls the schedule, which sends the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn

from torchmn.base import events
from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError
from torchmn.base.torch_private import current_graph_task_id
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.counts import NumExchanges, NumSteps
from torchmn.exchange.agreements.facts import LateRanks, MeasuredNorms
from torchmn.exchange.agreements.received_batches import ReceivedBatches
from torchmn.exchange.agreements.replica_checksum import ReplicaChecksum
from torchmn.exchange.agreements.together import GivenUp, LoadedState, OtherLayout, Together
from torchmn.exchange.backward_pass import AtEnd, BackwardPass, Passes, PassState
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.codec_state import load_codec_state
from torchmn.exchange.early_packing import EarlyPacking
from torchmn.exchange.exchanged_parameters import ExchangedParameters, raise_if_on_another_gpu
from torchmn.exchange.finiteness import NonfiniteGradients
from torchmn.exchange.gradient_exchange import GradientExchange
from torchmn.exchange.local_passes import LocalPasses
from torchmn.exchange.options import GradientOptions
from torchmn.exchange.parameter_hook import GradientHooks
from torchmn.exchange.replica_divergence import ReplicaWatch, Watched
from torchmn.exchange.sums import Sums
from torchmn.exchange.weights import Contribution


class GradientReducer:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    Args:
        comm: the ranks, and the route between them.
        codec: the form in which buckets are sent; None as they are.
        parameters: called for the parameters by name, in the order of registration.
        num_sets: sets of buckets that are used in turns: with two, the means of one step are in
            use while the sums of the next are under way; with none, the reducer is suspended until
            `reconfigure`.
        options: how gradients are combined.
        contribution: the weight and the samples of this rank.
        find_sparse: called for the parameters whose gradients are sparse.
        find_untrained: called at the first exchange for parameters of the model without a reducer;
            those that require a gradient are exchanged as well.
        find_buffers: called for the model's buffers that must be the same on all ranks.
        on_backward_end: called when the gradients of a backward pass are packed and all buckets but
            the last were handed over: a schedule's `backward_ended`.
        on_nonfinite: raises or warns about what is not finite, as the user has asked. *Collective.*
        agreements: called for each set of buckets: what its owner wants to be the same on ranks.
        owner: the optimizer, for those that find the reducer by a parameter's hook.

    Only its own methods change a reducer. What this rank puts into an exchange is a frozen
    `PassContext`, made when its first gradient is there.

    A pass that raised is given up when the next one begins: the ranks end its exchange and discard
    it. Parameters that are other objects or have another dtype, device, shape or ``requires_grad``
    than at the last pass are laid out again. Both must happen on all ranks; where it does not, all
    raise RankMismatchError, for the footer of each exchange holds what its ranks are about to do.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Callable[[], Sequence[NamedParameter]],
        *,
        num_sets: int,
        on_backward_end: Callable[[], None],
        options: GradientOptions,
        contribution: Contribution,
        in_groups: Callable[[], Sequence[nn.Parameter]] = tuple,
        find_sparse: Callable[[], Collection[nn.Parameter]] = tuple,
        find_untrained: Callable[[], Sequence[NamedParameter]] = tuple,
        find_buffers: Callable[[], Sequence[Watched]] = tuple,
        on_nonfinite: Callable[[], None] = lambda: None,
        agreements: Callable[[], Sequence[Agreement]] = tuple,
        owner: object = None,
    ) -> None:
        self.comm = comm
        self.codec = codec
        self.parameters = ExchangedParameters(parameters, in_groups, find_sparse, find_untrained)
        self.exchange = GradientExchange(self.parameters, max(1, num_sets), options)
        """What schedules do with the gradients that were packed."""
        self.contribution = contribution
        """This rank's weight in the next exchange or step, and its samples."""
        self.owner = owner
        self.act_on_nonfinite = on_nonfinite
        self.step = 0
        self.is_suspended = num_sets == 0
        """Whether nothing is exchanged: gradients stay this rank's own."""
        self.is_needed = False
        """Whether there is anything to do: one rank alone has its means already, but it must know
        what is not finite in other parts of a parallel layer."""
        self.is_active = True
        self.is_late = False
        """Whether the last exchange was made in `step`."""
        self.num_passes = 0
        """Exchanges with data of this rank since `restart_counts`."""
        self.passes_weight = 0.0
        """The sum of this rank's weights in them."""
        self._find_buffers = find_buffers
        self._further_agreements = agreements
        self.local_passes = LocalPasses()
        """Those under no_sync()."""
        self._given_up, self._other_layout = GivenUp(), OtherLayout()
        self._loaded, self._num_exchanges = LoadedState(), NumExchanges()
        self.replicas = ReplicaWatch()
        """Of what the script does to parameters, where it must be the same on all ranks."""
        self._on_backward_end = on_backward_end
        self._hooks = GradientHooks((), self._on_gradient)
        self._lock = threading.RLock()
        """Autograd has a thread for each device."""
        self.passes = Passes(comm.rank_label)
        self.rebuild()

    # ---- state ----

    def progress(self) -> dict[str, Any]:
        """The count of steps and what belongs to it, the same on all ranks. Local."""
        self.settle()
        exchange = self.exchange
        return {
            "step": self.step,
            "scale": exchange.scale,
            "has_untrained": bool(self.parameters.untrained),
            "problems": [asdict(problem) for problem in exchange.nonfinite.problems],
        }

    def load_state_dict(self, codec: dict[str, Any], progress: dict[str, Any]) -> None:
        """Continue from a state of the codec and `progress`. All ranks must call it, or none.

        The codec's state of another rank is left out; an empty ``progress`` keeps the count of
        steps.
        """
        load_codec_state(self.codec, self.comm, codec)
        self._loaded.note()
        exchange = self.exchange
        exchange.num_in_step = 0
        self.replicas.forget()
        exchange.forget_scale()
        if not progress:
            return
        self.step = progress["step"]
        exchange.nonfinite.problems[:] = [NonfiniteGradients(**p) for p in progress["problems"]]
        if exchange.is_narrow:
            exchange.scale = progress["scale"]

    def end_step(self, *, are_replicas: bool = False) -> None:
        """The optimizer has stepped. Local.

        ``are_replicas``: whether parameters are up to date now and the same on all ranks.
        """
        self.step += 1
        self.local_passes.may_exist = False
        self.exchange.num_in_step = 0
        self.replicas.step_ended()
        is_needed = self.is_needed
        if are_replicas and is_needed:
            self.replicas.note(self.step, self.comm.size)
        if not is_needed:  # no backward pass does it
            self.contribution.reset()
        self.contribution.end_step()

    # ---- layout ----

    def rebuild(self) -> None:
        """Lay out the buckets again, for the parameters that are trainable now. *Collective.*"""
        self.close()
        self.settle()
        local = self.local_passes
        trainable = self.parameters.lay_out(local.states)
        sparse = self.parameters.sparse
        if self.comm.size > 1:
            raise_if_on_another_gpu([*trainable, *sparse], self.comm)
        if self.is_suspended:
            trainable, sparse = [], []
        if self.parameters.are_sharded or self.parameters.has_parallel_layers:
            self.replicas.watch([])
        else:
            self.replicas.watch([*trainable, *sparse], self._find_buffers())
        self._num_exchanges.num = 0
        self._watched = self.parameters.differentiable
        self.exchange.lay_out(
            self.comm, self.codec, trainable, sparse, self._watched, self._agreements
        )
        self.is_needed = not self.is_suspended and (
            self.comm.size > 1 or self.exchange.num_sets > 1 or self.parameters.has_parallel_layers
        )
        watched = self._watched if self.is_needed else ()
        self._hooks = GradientHooks(watched, self._on_gradient)
        self._early = EarlyPacking(self.exchange, self._hooks)

    def reconfigure(
        self,
        comm: Communicator,
        codec: Codec | None,
        *,
        num_sets: int | None = None,
        bucket_bytes: int | None = None,
        on_backward_end: Callable[[], None] | None = None,
    ) -> None:
        """Exchange over another communicator, in another form, from now on. *Collective.*

        Options that are None stay as they are.
        """
        self.comm, self.codec, self.is_suspended = comm, codec, False
        self.exchange.num_sets = self.exchange.num_sets if num_sets is None else num_sets
        self.exchange.bucket_bytes = bucket_bytes or self.exchange.bucket_bytes
        self._on_backward_end = on_backward_end or self._on_backward_end
        self.rebuild()

    def suspend(self) -> None:
        """Exchange nothing until `reconfigure`: every ``p.grad`` stays this rank's own. Local."""
        self.codec, self.is_suspended = None, True
        self.rebuild()

    def close(self) -> None:
        """Stop watching backward passes."""
        self._hooks.remove()

    def close_for_good(self) -> None:
        """Let go of what has this reducer as well: it is freed without the garbage collector."""
        self.close()
        self.replicas.watch([])
        self.owner, self.act_on_nonfinite, self._on_backward_end = None, _nothing, _nothing

    # ---- during backward ----

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Take part in exchanges with weight 0. Local."""
        self.is_active = False
        try:
            yield
        finally:
            self.is_active = True
            self.replicas.forget()

    def _on_gradient(self, index: int) -> None:
        """A gradient is final: pack it, which sends the buckets that are full in order."""
        with self._lock:
            local = self.local_passes
            if local.are_on:
                watched = self._watched[index]
                local.note(watched, is_final=not self._hooks.have_later((index,)))
                return
            pass_ = self.passes.current
            if pass_ is None or current_graph_task_id() not in pass_.ids:
                pass_ = self._open_backward()
            exchange = self.exchange
            slot = exchange.filling.slot_at[index]
            if slot is None or exchange.packing is None or not pass_.packs_early:
                return  # not in the layout, or the end of backward sees to it
            self._early.arrived(slot)

    def _open_backward(self) -> BackwardPass:
        """The first gradient of a backward pass, or of one that runs inside of it."""
        passes, current = self.passes, self.passes.current
        if current is not None:
            if passes.state is PassState.FAILED:
                passes.raise_if_unfinished()
            if passes.state is PassState.FILLING:
                current.ids.add(current_graph_task_id())
                return current
            self._give_up_pass()
        engine = self.comm.engine
        engine.raise_if_capturing()  # before anything has begun
        exchange = self.exchange
        if exchange.unsettled is not None:
            self.settle()
        self.is_late = False
        parameters = self.parameters
        packs_early = (
            exchange.scale is not None
            and parameters.can_be_compared_in_backward
            and not parameters.have_changed()
        )
        callback = AtEnd(self._end_backward, is_last=parameters.are_sharded)
        begun = passes.begin(callback, self._hooks.call_again, packs_early=packs_early)
        self._begin_exchange()
        if packs_early and not parameters.are_sharded:
            self._early.begin()
        return begun

    def _begin_exchange(self) -> None:
        """Fix what this rank contributes; once for each exchange."""
        if self.exchange.packing is None:
            if self.exchange.unsettled is not None:
                self.settle()
            self.exchange.begin(self._context(), self.step)

    def settle(self) -> None:
        """Raise or warn of what the host has learned of the last exchange since. *Collective.*

        On a CPU nothing is left to do.
        """
        if self.exchange.settle():
            self.act_on_nonfinite()

    def _context(self) -> PassContext:
        own, is_active = self.contribution, self.is_active
        has_backward = self.passes.current is not None or bool(self.local_passes.states)
        own.begin_exchange(self.step, has_backward=has_backward)
        weight, num_samples = 0.0, 0.0
        if is_active:
            weight, num_samples = own.weight, own.num_samples
            mesh = self.parameters.mesh
            if mesh.size > 1:
                weight, num_samples = mesh.mean_weights(weight, num_samples, self.comm.rank_label)
        return PassContext(
            step=self.step,
            weight=weight,
            num_samples=num_samples,
            is_active=is_active,
            is_weight_given=is_active and own.is_set,
        )

    def _agreements(self) -> list[Agreement]:
        """What ranks must have in common at the exchanges of one set of buckets."""
        return [
            self._given_up,
            self._other_layout,
            self._loaded,
            NumSteps(self.replicas),
            ReplicaChecksum(self.replicas),
            *self._further_agreements(),
            ReceivedBatches(
                self.contribution, compares_counts=not self.parameters.has_parallel_layers
            ),
            self._num_exchanges,
            LateRanks(),
            MeasuredNorms(),
        ]

    def _end_backward(self) -> None:
        passes = self.passes
        self._early.end()
        ended = passes.end()
        for observer in events.observers:
            observer.phase("exchange", begins=True)
        try:
            # Of a pass that runs inside of another one, as reentrant checkpoints do, this is a
            # part: what comes later is exchanged later, and what is a mean already stays one.
            self.exchange_now()
        except (UsageError, UnsupportedError):
            raise  # on all ranks, and nothing is under way: they may continue
        except BaseException as error:
            # Ranks that gave up a pass use the same buckets again, others the next ones.
            if self.exchange.num_sets > 1 or not isinstance(error, RankMismatchError):
                passes.fail(ended, error)
            raise
        finally:
            passes.is_joint = passes.are_compared = False
            for observer in events.observers:
                observer.phase("exchange", begins=False)

    def _give_up_pass(self) -> None:
        """End the exchange of a pass that raised, and discard it. *Collective.*

        Raises RankMismatchError on all ranks, also at the end of the pass of those that have not
        given it up, unless all have.
        """
        passes = self.passes
        given_up, passes.current = passes.current, None
        sums = self._end_without_means(self._given_up)
        try:
            sums.raise_if_ranks_disagree()
        except RankMismatchError as error:
            if self.exchange.num_sets > 1 and given_up is not None:  # others use the next buckets
                passes.fail(given_up, error)
            raise

    def _end_without_means(self, why: Together) -> Sums:
        """Send the rest of this exchange with a footer that says why there will be no means."""
        why.note()
        exchange = self.exchange
        self._begin_exchange()
        exchange.scale = exchange.filled.await_scale(exchange.scale)
        sums = exchange.give_up()
        self._num_exchanges.num += 1
        return sums

    def on_zero_grad(self) -> None:
        """Gradients were cleared. Local."""
        local, passes = self.local_passes, self.passes
        local.states.clear()
        local.may_exist = False
        self.exchange.num_in_step = 0
        if passes.current is not None:
            passes.clear()
        own = self.contribution
        if own.has_counted:
            own.zero_grad()

    # ---- at the end of backward ----

    def exchange_now(self, *, is_late: bool = False) -> None:
        """Take the gradients as they are for those of this backward pass. *Collective.*

        ``is_late``: in `step`, as no backward pass has done it; see `share_with_late_ranks`.
        """
        if not self.is_needed:
            return
        passes, local = self.passes, self.local_passes
        if passes.current is not None:
            passes.raise_if_unfinished()
            self._give_up_pass()
        self.is_late = is_late
        local.end(is_late=is_late)
        self.finish_filling()
        packing = self.exchange.filled
        weight = packing.context.weight
        is_of_sums = packing.is_accumulating and self.exchange.reduction == "sum"
        try:
            self._on_backward_end()
            self.exchange.num_in_step += 1
        finally:
            self.num_passes += 1
            self.passes_weight += weight
            self.contribution.reset()
        if is_of_sums:
            raise UnsupportedError(
                f"{self.comm.rank_label}: this backward pass added to a sum over ranks, which was "
                "then added up over ranks once more (reduction='sum'). Call zero_grad() before "
                "each step, and wrap all passes of a step but the last in optimizer.no_sync()."
            )

    def exchange_if_late(self) -> None:
        """Before a step uses gradients: take part, if no backward pass of this rank has done it."""
        if self.exchange.num_in_step == 0 or self.local_passes.states:
            self.exchange_now(is_late=True)

    def finish_filling(self) -> None:
        """Pack what is not packed yet and hand over what may be sent early. *Collective.*

        Parameters that have changed, on all ranks, are laid out again: nothing of this pass was
        packed. Raises RankMismatchError on all ranks: not all have changed them.
        """
        passes, local = self.passes, self.local_passes
        passes.raise_if_unfinished()
        if not passes.are_compared and self.parameters.have_changed():
            self._end_without_means(self._other_layout).raise_if_ranks_disagree()
            self.rebuild()
        passes.are_compared = False
        exchange = self.exchange
        if exchange.packing is None:
            self._begin_exchange()
        filling, packing = exchange.filling, exchange.filled
        if exchange.scale is None:
            exchange.scale = packing.await_scale(None)
        self._early.pack_rest()
        has_gradients = not self.is_late or (
            any(slot.has_gradient for slot in filling.slots)
            or any(parameter.grad is not None for _, parameter in self.parameters.sparse)
        )
        filling.footer.get(LateRanks).note(
            is_late=self.is_late, has_gradients=has_gradients, is_joint=passes.is_joint
        )
        packing.finish()
        local.states.clear()
        self._num_exchanges.num += 1
        self.replicas.exchanged()

    def shadow_exchange(self) -> Sums:
        """Take part in an exchange of the other ranks without data. *Collective.*"""
        self.is_late = False
        local = self.local_passes
        local.were_changed = False
        self.finish_filling()
        means = self.exchange.send()
        means.wait()
        self.exchange.discard(means)
        self.replicas.forget()
        return means

    # ---- inside ----

    def restart_counts(self) -> None:
        """Set `num_passes` and `passes_weight` to zero. Local."""
        self.num_passes, self.passes_weight = 0, 0.0


def _nothing() -> None:
    """The listener of a reducer that is closed."""
