"""The multi-node optimizer: wraps a user's optimizer, whose gradients become means over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base import events
from torchmn.base.compiling import not_compiled
from torchmn.base.errors import TorchmnError, UnsupportedError, UsageError
from torchmn.base.names import AUTO
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.comm.training_start import training_start, training_steps
from torchmn.data.divided_batches import divided_batches
from torchmn.exchange.agreements.base import Agreement
from torchmn.exchange.agreements.learning_rates import LearningRates
from torchmn.exchange.auto.tuner import Autotuner
from torchmn.exchange.finiteness import NonfiniteGradients, act_on_nonfinite, record_own_nonfinite
from torchmn.exchange.first_forward import watch_first_forward
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.optimizer import resume
from torchmn.exchange.optimizer.block_reads import BlockReads
from torchmn.exchange.optimizer.group_parameters import GroupParameters, arguments_of
from torchmn.exchange.optimizer.model_checks import (
    untrained_parameters,
    warn_of_untrained_parameters,
)
from torchmn.exchange.optimizer.recorded_steps import RecordedSteps
from torchmn.exchange.optimizer.sample_weights import SampleWeights
from torchmn.exchange.optimizer.unusual_steps import UncountedSteps, joined, over_ranks
from torchmn.exchange.optimizer.wrapped_optimizer import (
    WrappedOptimizer,
    before_step,
    raise_if_it_has_no_hooks,
)
from torchmn.exchange.options import GradientOptions
from torchmn.exchange.parameter_hook import owners_of
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replica_divergence import buffers_of_replicas
from torchmn.exchange.replicas import parameters_of
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.sparse_gradients import sparse_parameters
from torchmn.exchange.weights import Contribution
from torchmn.nn.clipping import clip_grad_norm_


class MultiNodeOptimizer(WrappedOptimizer):
    """A `torch.optim.Optimizer` over several ranks, created by `create_multi_node_optimizer`.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, and reading
    them never waits. When ``backward()`` returns, every ``p.grad`` holds the mean over ranks (with
    double buffering the mean of the previous step; with local updates the rank's own gradient).

    Attributes:
        inner: the optimizer that was wrapped.
        communicator: the ranks, and the route between them.
        schedule: when ranks exchange gradients or parameters.
        reducer: sums the gradients over ranks.
        tuner: with ``auto`` the object that selects schedule and codec; otherwise None.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
        >>> optimizer.inner is sgd, optimizer.schedule.name
        (True, 'every_step')
    """

    def __init__(
        self,
        inner: Optimizer,
        comm: Communicator,
        models: Sequence[nn.Module],
        schedule: Schedule,
        codec: Codec | None,
        options: GradientOptions,
    ) -> None:
        _raise_if_attached(schedule)
        raise_if_it_has_no_hooks(inner)
        self.inner, self.communicator, self.schedule = inner, comm, schedule
        self.tuner = schedule if isinstance(schedule, Autotuner) else None
        self._taken_over_by = ""
        self._models = models = list(models)  # what refers to them need not refer to this
        self._options = options
        self._codec_name = None if codec is None else codec.name
        self._is_closed = self._has_closure = False
        self._remove_step_hook: Callable[[], None] = lambda: None
        self._hooks, self._first_forward = ModelHooks(), ModelHooks()
        self._steps = training_steps(comm)
        self._steps.expect()
        asked: dict[str, object] = {"schedule": schedule.name, "codec": self._codec_name}
        if self.tuner is not None:
            asked = {"schedule": f"{AUTO} among {self.tuner.space}"}
        asked |= arguments_of("schedule", schedule) | arguments_of("codec", codec)
        self._in_groups = GroupParameters(comm, inner, models, asked | options.to_compare())
        self._take_over()
        traits, loaders = schedule.traits, divided_batches(comm)
        self.reducer = GradientReducer(
            comm,
            codec,
            self._in_groups.named,
            in_groups=lambda: parameters_of(inner),
            num_sets=traits.num_sets,
            on_backward_end=schedule.backward_ended,
            options=options,
            contribution=Contribution(
                is_by_samples=options.weight == "samples", loaders=loaders, size=comm.size
            ),
            find_sparse=lambda: sparse_parameters(models),
            find_untrained=lambda: untrained_parameters(inner, models),
            find_buffers=lambda: buffers_of_replicas(models),
            on_nonfinite=self._act_on_problem,
            agreements=lambda: _agreements(inner),
            owner=self,
        )
        loaders.facts.append(ref(self.reducer.replicas))  # weak: loaders outlive an optimizer
        self.seeds: object = None
        """What compares the seeds of ranks while this optimizer lives, if its model has dropout."""
        self.sample_weights = SampleWeights(
            models,
            self._hooks,
            self.reducer,
            has_own_steps=traits.has_own_steps,
            before_count=self._before_forward,
        )
        self.recorded = RecordedSteps(inner, self.reducer, schedule, models)
        self._block_reads = BlockReads(comm, schedule, self._hooks)
        uncounted = UncountedSteps(schedule.name, inner, self.reducer)
        self._before_steps = [uncounted.before_step] if traits.counts_samples else []
        self._after_steps = [self._warn_of_untrained]
        try:
            schedule.attach(self.reducer, inner, models)
            self._remove_step_hook = before_step(inner, self._before_step)
            # With this the model also keeps the optimizer: gradients are exchanged even if nothing
            # else refers to it.
            self._hooks.before_copy(models[0], lambda: self.schedule.before_access("read"))
            for model in models:
                self._hooks.before_load(model, lambda: self.schedule.before_access("load"))
            if traits.has_own_steps:
                self._block_reads.watch(models)
                self._after_steps.append(self._block_reads.end_step)
            if options.weight == "samples" or traits.counts_samples:
                self.sample_weights.count()
            self._first_forward = watch_first_forward(models)
            self.recorded.meet()
        except BaseException:
            self.reducer.close()  # nothing else will
            self._unhook()
            raise
        self._is_complete = True

    def _unhook(self) -> None:
        self._remove_step_hook()
        self._hooks.remove()
        self._first_forward.remove()

    # ---- what makes it an Optimizer ----

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales gradients itself: always False.

        ``torch.amp.GradScaler.step`` reads it before each step, so that scalers are noticed here.
        Local. Raises UnsupportedError: the gradients are of an earlier step, and have its scale;
        UsageError: this rank has no gradients, so that its scaler could not decide as the others.
        """
        self._meet_scaler()
        reducer = self.reducer
        if reducer.is_needed and all(p.grad is None for p in parameters_of(self.inner)):
            raise UsageError(
                f"{self.communicator.rank_label}: a GradScaler is to step, and this rank has no "
                "gradients: it had no backward pass. Where a rank has nothing to learn from call "
                "optimizer.skip_backward() in place of backward(), before scaler.unscale_() and "
                "scaler.step(): every p.grad is then the mean of the other ranks."
            )
        return False

    def _meet_scaler(self) -> None:
        traits = self.schedule.traits
        if traits.staleness_steps:
            raise UnsupportedError(
                f"GradScaler and {self.schedule.name} cannot be combined: the gradient in p.grad "
                "is of an earlier step and carries that step's scale. Use schedule='every_step', "
                "or bfloat16, which needs no scaling."
            )
        if self.tuner is not None:
            self.tuner.scaler_used()

    def __repr__(self) -> str:
        parts = [self.schedule.name]
        if self._codec_name is not None:
            between = self.communicator.route.codec_scope or "no ranks"
            parts.append(f"{self._codec_name} between {between}")
        return f"MultiNodeOptimizer({', '.join(parts)}, {self.communicator!r}, {self.inner!r})"

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as the inner optimizer does, and drop means not yet applied. Local."""
        self.reducer.on_zero_grad(keeps_zeros=not set_to_none)
        in_groups = chain.from_iterable(map(itemgetter("params"), self.inner.param_groups))
        if self._in_groups.ids != [*map(id, in_groups)]:  # `have_changed`, without its call
            self._follow_groups()
        self.inner.zero_grad(set_to_none)

    @not_compiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. *Collective*: all ranks make the same number of steps.

        A rank without a backward pass takes part with zeros, and then takes over the gradients of
        another rank as they are now, for instance clipped. Where it cannot (shards of parameters,
        double buffering), the other ranks raise RankMismatchError if their script has changed them:
        use `skip_backward` there. The loss of a closure is averaged over ranks (or added, like
        gradients), so that optimizers that use it (LBFGS) decide the same on all ranks. Under local
        updates ranks may make different numbers of steps: they exchange when their samples fill a
        block, and the loss of a closure is the rank's own.

        Raises:
            UsageError: the last backward pass raised, or another optimizer took the parameters.
            NonFiniteGradientError: with ``on_nonfinite="raise"``, a gradient is not finite.
            CommunicationError, RankMismatchError: the exchange failed.
        """
        if self._taken_over_by:
            raise UsageError(
                f"{self.communicator.rank_label}: {self._label} gave its parameters to "
                f"{self._taken_over_by}, which was made later for some of the same parameters: "
                "only one multi-node optimizer can exchange the gradient of a parameter. Step the "
                "newer one, or make one optimizer with several parameter groups."
            )
        if not events.observers:
            result = self._step(closure)
        else:
            with self.recorded.step(self):
                result = self._step(closure)
        if training_start.function is not None:
            training_start.begin()  # where no forward pass was seen, as in compiled code
        return result

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        reducer, schedule = self.reducer, self.schedule
        passes = reducer.passes
        if passes.current is not None:
            passes.raise_if_unfinished()
        self._has_closure = closure is not None
        if closure is not None:
            if reducer.contribution.is_joining:
                raise UnsupportedError(
                    "step(closure) inside join(): a rank that has left its loop cannot take part "
                    "in the mean of the loss. Compute loss and gradients before step()."
                )
            closure = over_ranks(closure, reducer, self._make_ready_for_step)
        else:
            for function in self._before_steps:
                function()
        result = schedule.step(closure)
        reducer.end_step(are_replicas=schedule.traits.replica_consistency == "per_step")
        self._steps.count = (self._steps.count or 0) + 1
        for function in self._after_steps:
            function()
        self._follow_groups()
        return result

    def skip_backward(self) -> None:
        """Take part in a step without data; call it in place of ``backward()``.

        *Collective* with the backward passes of the other ranks. Every ``p.grad`` becomes their
        mean, to which this rank contributes nothing (or zeros with the weight of `set_weight`), so
        that ``GradScaler.unscale_`` and clipping do the same on all ranks. Otherwise `step` takes
        part in the exchange, which is too late for a GradScaler. (A scaler that has not scaled a
        loss yet needs ``scaler.scale(torch.zeros(()))`` before its first step.)

        Raises UsageError: other optimizers exchange gradients in the same backward pass, which then
        needs a batch of 0 rows on this rank.
        """
        reducer = self.reducer
        own = reducer.contribution
        if not (own.is_set or reducer.local_passes.states):
            own.set(0.0, 0.0)
        reducer.exchange_now()

    def replicated_tensors(self) -> list[Tensor]:
        """The parameters, if the schedule keeps them bit-identical on all ranks; else empty. Local.

        These are the tensors that a replica check may compare.
        """
        self.schedule.before_access("read")
        return [*parameters_of(self.inner)] if self._are_replicas else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer. *Collective.*

        All ranks take rank 0's parameters, buffers and optimizer state. Raises UsageError: a
        parameter is not in the model; the group is then not added.
        """
        self.schedule.before_access("read")
        if not self._are_replicas:
            self.schedule.flush()  # or what other ranks have learned would be overwritten
        self.inner.add_param_group(param_group)
        try:
            self._lay_out_again()
        except TorchmnError:
            self.inner.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the inner state, which a plain optimizer can load too, and ours under ``torchmn``.

        The state differs between ranks: save it on every rank, between two steps or, with
        `no_sync`, between two backward passes of one step. On the same number of ranks each loads
        its own state and continues exactly; on another number see `reshard_state_dict`. Local;
        waits for exchanges that are under way. On a GPU it is *collective* after a step whose
        gradients were not finite: all ranks raise that, or warn, before anything is saved.
        """
        self._block_reads.note_checkpoint()
        return resume.save(self.inner, self.schedule, self.reducer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of a plain optimizer. All ranks must call it, or none.

        Local, but *collective* with ``auto``, and if parameters were exchanged that no optimizer
        trains. Raises UsageError: the state is that of another schedule or class of optimizer.
        """
        self._block_reads.note_checkpoint()
        resume.load(state_dict, self.inner, self.schedule, self.reducer)

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """Return the state that this rank loads, from the `state_dict` of all old ranks. Local.

        ``states`` are in rank order; there may be more or fewer of them than ranks now. Residuals,
        pending means, anchors and partial blocks are distributed anew (see
        `torchmn.exchange.resharding`). If the old ranks' parameters differed, in the middle of a
        block, the state holds the new parameters: load the model of any old rank before the
        optimizer. Raises UsageError: the old ranks were saved at different points.
        """
        return resume.reshard(states, comm, self.schedule, self._options.reduction)

    def resume_warnings(self) -> list[str]:
        """Describe the differences if a state is loaded by another number of ranks. Local."""
        return resume.other_size_warnings(
            self.schedule, codec=self._codec_name, models=self._models
        )

    # ---- methods that a plain optimizer does not have ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which gradients are accumulated without exchange. Local.

        The first backward pass outside exchanges the sum. If no such pass follows, `step` performs
        the exchange. Clipping done before that applies to local gradients: `step` then warns, or
        raises RankMismatchError if other ranks made such a pass.
        """
        local = self.reducer.local_passes
        return local.no_sync()

    def set_weight(self, weight: float) -> None:
        """Set this rank's weight in the next mean, such as its number of samples or tokens. Local.

        The mean over ranks is sum(w_i g_i) / sum(w_i) with g_i the local mean. Applies to the next
        backward pass only; under local updates to the next step, where it replaces the number of
        samples that was counted. Batch normalization over ranks uses the weight too.

        Raises UsageError: the weight is negative or not finite, or, if gradients are summed,
        neither 0 nor 1.
        """
        self.sample_weights.set(weight)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context of a loop that may end earlier on some ranks. *Collective.*

        As with `torch.distributed.algorithms.Join`, a rank that has left its loop takes part in the
        exchanges of the others with weight 0, so that means are over the ranks that still have
        data.

        When all have left, the ranks that ended early take parameters, buffers and optimizer state
        from one that ran to the end. Whatever is outside the optimizer, such as a learning rate
        scheduler, they must update themselves. Under local updates the last, partial block is
        exchanged instead, and each rank keeps its own buffers and optimizer state.

        No other collective may be called inside. Raises UnsupportedError: `step` is called with a
        closure inside.
        """
        contribution = self.reducer.contribution
        contribution.is_joining = True
        try:
            with joined(self, self._models):
                yield
        finally:
            contribution.is_joining = False

    def flush(self) -> None:
        """Apply means that are still pending, and end a partial block. *Collective.*

        Afterwards all ranks hold the same parameters.
        """
        self.schedule.flush()

    def serve(self) -> bool:
        """Serve, on a rank that only serves (`ParameterServer`), until all workers left `join`.

        *Collective*, with `join` on the workers. Returns whether this rank only serves; on the
        others, which train, it returns False at once.
        """
        traits = self.schedule.traits
        if traits.serves:
            with self.join():
                pass
        return traits.serves

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the current gradients by their global norm; returns the norm before. Local.

        *Collective over the ranks of the model* if it is sharded; the norm is that of the whole
        model.
        """
        return clip_grad_norm_(parameters_of(self.inner), max_norm, norm_type)

    @property
    def nonfinite(self) -> list[NonfiniteGradients]:
        """All steps whose gradients were not finite on some rank, with ranks and parameters."""
        exchange = self.reducer.exchange
        return exchange.nonfinite.problems

    def close(self) -> None:
        """Release the model, to train it alone or to create another optimizer for it. Local."""
        self._is_closed = True
        self._after_steps.clear()
        self._block_reads.close()
        self.schedule.close()
        self.reducer.close_for_good()
        self.recorded.close(self)
        self.sample_weights.close()
        self._unhook()

    # ---- parameters that the script replaces in the groups ----

    def _follow_groups(self) -> None:
        """Follow parameters that the script has replaced in the groups. *Collective* then.

        Gaussian splatting replaces all of them between steps; other scripts append to a group.
        """
        if self._is_closed or not self._in_groups.have_changed():
            return
        if not self._are_replicas:
            raise UnsupportedError(
                f"{self.communicator.rank_label}: other parameters were put into the optimizer's "
                f"groups, which {self.schedule.name} cannot follow: call flush() and close() "
                "before that, and create_multi_node_optimizer(optimizer.inner, ...) after it."
            )
        self.schedule.before_access("read")
        self._lay_out_again()

    def _lay_out_again(self) -> None:
        self._take_over()
        self.reducer.rebuild()
        self.schedule.rebuild()

    def _take_over(self) -> None:
        """Take over the parameters that are in the groups now. *Collective.*

        Other optimizers that have exchanged them give them up.
        """
        ours = self._in_groups.find()
        # By the hooks on the parameters: nothing else knows who exchanges them.
        for reducer in owners_of(ours):
            older = reducer.owner if isinstance(reducer, GradientReducer) else None
            if not isinstance(older, MultiNodeOptimizer) or older is self:
                continue
            if ours.isdisjoint(parameters_of(older.inner)):  # it exchanges what nothing trained
                older.schedule.before_access("read")
                exchanged = older.reducer.parameters
                if exchanged.release(ours):
                    older.reducer.rebuild()
            else:  # it may hold a step of its own in parameters
                older._taken_over_by = self._label
                older.close()
        self._in_groups.unify()

    def _before_forward(self, model: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._follow_groups()
            contribution = self.reducer.contribution
            if contribution.batches is not None:
                contribution.batches.raise_if_stream_is_elsewhere(self.communicator.rank_label)

    @property
    def _are_replicas(self) -> bool:
        """Whether the schedule keeps parameters the same on all ranks after each step."""
        traits = self.schedule.traits
        return traits.replica_consistency == "per_step"

    @property
    def _label(self) -> str:
        return f"the multi-node optimizer of {type(self.inner).__name__} ({self.schedule.name})"

    # ---- in a step ----

    def _before_step(self, *_: object) -> None:
        """Prepare gradients; called before the inner optimizer's step, which a GradScaler may skip.

        Raises UnsupportedError: it is called inside ``backward()``.
        """
        passes = self.reducer.passes
        if passes.current is not None and passes.are_inside:
            raise UnsupportedError(
                f"{self.communicator.rank_label}: {type(self.inner).__name__}.step() was called "
                "inside of backward(), by a hook on a parameter (gradient release, optimizer in "
                "backward), where means over ranks are not known yet. Leave such hooks out, and "
                "call step() after backward()."
            )
        if not self._has_closure:
            self._make_ready_for_step()

    def _make_ready_for_step(self) -> None:
        """Check, fill and clip gradients before the inner optimizer uses them."""
        reducer = self.reducer
        exchange = reducer.exchange
        if not reducer.is_needed:
            exchange.fill_missing()
            if not reducer.is_suspended:
                record_own_nonfinite(reducer)
        if exchange.unsettled is not None or exchange.nonfinite.current is not None:
            self._act_on_problem()
        if self._options.max_grad_norm is not None:
            self.clip_grad_norm_(self._options.max_grad_norm)

    def _act_on_problem(self) -> None:
        act_on_nonfinite(self.reducer, self._options.on_nonfinite)

    def _warn_of_untrained(self) -> None:
        """Warn about untrained parameters once, after the first step, when they are known."""
        reducer = self.reducer
        if reducer.is_needed:
            self._after_steps.remove(self._warn_of_untrained)
            warn_of_untrained_parameters(self.communicator, reducer.parameters.untrained)


def _agreements(inner: Optimizer) -> list[Agreement]:
    """The agreements that the optimizer adds to those of the reducer, for one set of buckets."""
    return [LearningRates(inner)]


def _raise_if_attached(schedule: Schedule) -> None:
    if "_reducer" in vars(schedule):
        raise UsageError(
            f"This {type(schedule).__name__} object belongs to another optimizer already, whose "
            "state it holds. Make a new schedule object for each optimizer."
        )
