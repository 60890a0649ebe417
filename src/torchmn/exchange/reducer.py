"""The reducer: sums gradients over ranks while backward still runs.

Hooks copy each gradient into its bucket as soon as it is final, and hand a full bucket to the
communicator's engine; hooks never block. Buckets are sent in one order, the same on all ranks, so
a bucket that is full early waits for those before it. At the end of backward a callback packs the
remaining slots and calls the schedule, which sends the remaining buckets.
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
from torchmn.exchange.agreements.facts import LateRanks
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
from torchmn.exchange.packing import Packing
from torchmn.exchange.parameter_hook import GradientHooks
from torchmn.exchange.replica_divergence import ReplicaWatch, Watched
from torchmn.exchange.sums import Sums
from torchmn.exchange.weights import Contribution


class GradientReducer:
    """Watches the backward passes of some parameters and sums their gradients over ranks.

    Args:
        comm: the ranks, and the route between them.
        codec: the form in which buckets are sent; None sends them unencoded.
        parameters: returns the parameters with their names, in the order of registration.
        num_sets: number of bucket sets, used in turns: with two, the means of one step are in
            use while the sums of the next are under way; with none, the reducer is suspended until
            `reconfigure`.
        options: how gradients are combined.
        contribution: the weight and the samples of this rank.
        in_groups: returns the parameters as the optimizer's groups hold them now.
        find_sparse: returns the parameters whose gradients are sparse.
        find_untrained: returns the model's parameters that no reducer has; called once, at the
            first exchange. Those that require a gradient are exchanged as well.
        find_buffers: returns the model's buffers that must be the same on all ranks.
        on_backward_end: called when the gradients of a backward pass are packed and all buckets but
            the last were handed over: a schedule's `backward_ended`.
        on_nonfinite: raises or warns about nonfinite gradients, as the user asked. *Collective.*
        agreements: returns further agreements for one set of buckets; called for each set.
        owner: the optimizer, for code that finds the reducer through a parameter's hook.

    Only its own methods change a reducer. What this rank contributes to an exchange is a frozen
    `PassContext`, made when the first gradient of the pass arrives.

    A pass that raised is given up when the next one begins: the ranks complete its exchange and
    discard it. The buckets are laid out again if parameters were replaced, or changed their dtype,
    device, shape or ``requires_grad``, since the last pass. Both must happen on all ranks: the
    footer of each exchange says what its ranks are about to do, and all raise RankMismatchError if
    they differ.
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
        """The exchanges of packed gradients, through which schedules send and assign them."""
        self.contribution = contribution
        """This rank's weight in the next exchange or step, and its number of samples."""
        self.owner = owner
        self.act_on_nonfinite = on_nonfinite
        self.step = 0
        self.is_suspended = num_sets == 0
        """Whether exchanges are switched off, so that every ``p.grad`` stays local."""
        self.is_needed = False
        """Whether backward passes are exchanged. A single rank already has the means, unless they
        are applied a step late, or it must learn of nonfinite values in the parts of a parallel
        layer that other ranks hold."""
        self.is_active = True
        self.is_late = False
        """Whether the last exchange was made in `step`, because there was no backward pass."""
        self.num_passes = 0
        """Number of exchanges to which this rank contributed since `restart_counts`."""
        self.passes_weight = 0.0
        """Sum of this rank's weights in those exchanges."""
        self._find_buffers = find_buffers
        self._further_agreements = agreements
        self.local_passes = LocalPasses()
        """Backward passes under no_sync() whose gradients no exchange has taken yet."""
        self._given_up, self._other_layout = GivenUp(), OtherLayout()
        self.passes = Passes(comm)
        self._loaded, self._num_exchanges = LoadedState(), NumExchanges(self.passes.number)
        self.replicas = ReplicaWatch()
        """Compares step counts and checksums, to find replicas that have diverged."""
        self._on_backward_end = on_backward_end
        self._hooks = GradientHooks((), self._on_gradient)
        self._lock = threading.RLock()
        """Guards `_on_gradient`: autograd runs one thread per device, and hooks run on them."""
        self.rebuild()

    # ---- state ----

    def progress(self) -> dict[str, Any]:
        """State that is the same on all ranks: number of steps, weight scale, problems found.

        Local, but for the last exchange of a GPU, see `settle`.
        """
        self.settle()
        exchange = self.exchange
        return {
            "step": self.step,
            "scale": exchange.scale,
            "has_untrained": bool(self.parameters.untrained),
            "problems": [asdict(problem) for problem in exchange.nonfinite.problems],
        }

    def load_state_dict(self, codec: dict[str, Any], progress: dict[str, Any]) -> None:
        """Continue from a saved codec state and `progress`. All ranks must call it, or none.

        A codec state that another rank saved is ignored; an empty ``progress`` keeps the current
        number of steps.
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
        """Count a step that the optimizer has made. Local.

        ``are_replicas``: whether all ranks now hold the same parameters.
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
        """Lay out the buckets anew for the parameters that are trainable now. *Collective.*"""
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
            self.replicas.watch([*trainable, *sparse], self._find_buffers)
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
    ) -> None:
        """Use another communicator and codec from the next exchange on. *Collective.*

        Keyword arguments that are None leave the current value.
        """
        self.comm, self.codec, self.is_suspended = comm, codec, False
        self.exchange.num_sets = self.exchange.num_sets if num_sets is None else num_sets
        self.exchange.bucket_bytes = bucket_bytes or self.exchange.bucket_bytes
        self.rebuild()

    def suspend(self) -> None:
        """Exchange nothing until `reconfigure`: every ``p.grad`` stays local. Local."""
        self.codec, self.is_suspended = None, True
        self.rebuild()

    def close(self) -> None:
        """Stop watching backward passes. Local."""
        self._hooks.remove()

    def close_for_good(self) -> None:
        """Stop watching, and drop the references to objects that refer back to this reducer. Local.

        Without reference cycles its buckets are freed at once, not by the garbage collector.
        """
        self.close()
        self.passes.close()
        self.replicas.watch([])
        self.owner, self.act_on_nonfinite, self._on_backward_end = None, _nothing, _nothing

    # ---- during backward ----

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Context in which this rank takes part in exchanges with weight 0. Local."""
        self.is_active = False
        try:
            yield
        finally:
            self.is_active = True
            self.replicas.forget()

    def _on_gradient(self, index: int) -> None:
        """Pack the gradient of parameter number ``index`` and send buckets that are full, in order.

        Called by autograd after it has accumulated the gradient.
        """
        with self._lock:
            local = self.local_passes
            if local.are_on:
                watched = self._watched[index]
                local.note(watched, is_final=not self._hooks.have_later((index,)))
                return
            pass_ = self.passes.current
            # A pass inside another one, as of a reentrant checkpoint, has a number of its own.
            if pass_ is None or current_graph_task_id() not in pass_.ids:
                pass_ = self._open_backward()
            exchange = self.exchange
            slot = exchange.filling.slot_at[index]
            if slot is None or exchange.packing is None or not pass_.packs_early:
                return  # not in the layout, or the end of backward sees to it
            self._early.arrived(slot)

    def _open_backward(self) -> BackwardPass:
        """Register the backward pass whose first gradient has arrived.

        A pass that runs inside the current one becomes a part of it.
        """
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
        if exchange.unsettled is not None:  # all ranks raise here what the device found meanwhile
            self.settle()
        self.is_late = False
        parameters = self.parameters
        # Gradients are packed times a factor that contains the scale, so not before it is known.
        packs_early = (
            exchange.scale is not None
            and parameters.can_be_compared_in_backward
            and not parameters.have_changed()
        )
        # fully_shard reduces its last gradients in a callback of its own: ours must come after it.
        callback = AtEnd(self._end_backward, is_last=parameters.are_sharded)
        begun = passes.begin(callback, self._hooks.call_again, packs_early=packs_early)
        self._begin_exchange()
        # Hooks in C note the object that torch passes, the DTensor; slots have its LocalShard.
        if packs_early and not parameters.are_sharded:
            self._early.begin()
        return begun

    def _begin_exchange(self) -> None:
        """Begin an exchange, unless one has begun, and fix what this rank contributes to it."""
        if self.exchange.packing is None:
            if self.exchange.unsettled is not None:
                self.settle()
            self.exchange.begin(self._context(), self.step)

    def settle(self) -> None:
        """Raise or warn about problems of the last exchange that have since become known.

        *Collective.* On a GPU the host does not wait for the checks of an exchange and reads them
        here, before the next one begins. On a CPU there is nothing to do.
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
        """The agreements of one set of buckets: what is compared over ranks in its footer."""
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
        """Complete the exchange of a pass that raised, and discard it. *Collective.*

        Raises RankMismatchError on all ranks unless all of them gave up the pass; ranks whose pass
        did not raise get the error at its end.
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
        """Complete this exchange with a footer that tells all ranks to discard it. *Collective.*

        ``why`` is the agreement that records the reason.
        """
        why.note()
        exchange = self.exchange
        self._begin_exchange()
        exchange.scale = exchange.filled.await_scale(exchange.scale)
        sums = exchange.give_up()
        self._num_exchanges.num += 1
        return sums

    def on_zero_grad(self, *, keeps_zeros: bool) -> None:
        """Forget what belongs to gradients that are cleared: to None, or to zeros. Local."""
        local, passes = self.local_passes, self.passes
        local.states.clear()
        local.may_exist = False
        self.exchange.num_in_step = 0
        passes.are_zeros = keeps_zeros
        if passes.current is not None:
            passes.clear()
        own = self.contribution
        if own.has_counted or own.given_weights:
            own.zero_grad()

    # ---- at the end of backward ----

    def exchange_now(self, *, is_late: bool = False) -> None:
        """Exchange the current gradients as those of one backward pass. *Collective.*

        ``is_late``: whether it is called from `step`, because this rank had no backward pass to do
        it; see `share_with_late_ranks`. Raises UnsupportedError: with ``reduction="sum"`` the pass
        added to gradients that are sums over ranks already.
        """
        if not self.is_needed:
            return
        passes, local = self.passes, self.local_passes
        if passes.current is not None:
            passes.raise_if_unfinished()
            self._give_up_pass()
        self.is_late = is_late
        local.end(is_late=is_late)
        packing = self.finish_filling()
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
        """Exchange gradients, unless a backward pass of this step has done so. *Collective.*"""
        if self.exchange.num_in_step == 0 or self.local_passes.states:
            self.exchange_now(is_late=True)

    def finish_filling(self) -> Packing:
        """Pack the remaining gradients and hand over the buckets that may be sent early.

        *Collective.* Returns the exchange that is filled. If parameters have changed, nothing of
        this pass was packed yet, and the buckets are laid out again. Raises RankMismatchError on
        all ranks: only some of them have changed parameters. Raises UsageError: this rank left out
        a backward pass that several optimizers share.
        """
        passes, local = self.passes, self.local_passes
        passes.raise_if_unfinished()
        is_with_old_gradients = self.is_late and self._has_gradients()
        if self.comm.size > 1 and not is_with_old_gradients:
            passes.raise_if_others_share_one()
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
        passes.are_zeros = False
        self._num_exchanges.num += 1
        self.replicas.exchanged()
        return packing

    def shadow_exchange(self) -> Sums:
        """Take part in an exchange of the other ranks with weight 0. *Collective.*

        Returns the completed sums; no ``p.grad`` changes.
        """
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

    def _has_gradients(self) -> bool:
        """Whether there are gradients that were not cleared, or that the script has assigned."""
        if self.local_passes.states:
            return True
        trained = self.parameters.trained()
        return not self.passes.are_zeros and any(p.grad is not None for _, p in trained)

    def restart_counts(self) -> None:
        """Set `num_passes` and `passes_weight` to zero. Local."""
        self.num_passes, self.passes_weight = 0, 0.0


def _nothing() -> None:
    """Stands in for the callbacks of a reducer that is closed."""
