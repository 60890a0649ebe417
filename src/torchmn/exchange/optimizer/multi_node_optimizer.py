"""The optimizer that users see: theirs, with gradients that are means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base import events
from torchmn.base.compiling import not_compiled
from torchmn.base.errors import TorchmnError, UnsupportedError, UsageError
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec, ErrorFeedback
from torchmn.comm.training_start import training_start, training_steps
from torchmn.data.divided_batches import divided_batches
from torchmn.exchange.agreements.base import Agreement
from torchmn.exchange.agreements.learning_rates import LearningRates
from torchmn.exchange.auto.tuner import Autotuner
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.finiteness import (
    NonfiniteGradients,
    act_on_nonfinite,
    record_own_nonfinite,
)
from torchmn.exchange.first_forward import watch_first_forward
from torchmn.exchange.gradient_norms import NormListener
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.optimizer import resume
from torchmn.exchange.optimizer.block_reads import BlockReads
from torchmn.exchange.optimizer.model_checks import (
    find_chains,
    untrained_parameters,
    warn_of_untrained_parameters,
)
from torchmn.exchange.optimizer.recorded_steps import RecordedSteps
from torchmn.exchange.optimizer.unusual_steps import (
    LateScalerSteps,
    UncountedSteps,
    joined,
    over_ranks,
)
from torchmn.exchange.optimizer.wrapped_optimizer import (
    WrappedOptimizer,
    before_step,
    raise_if_it_has_no_hooks,
)
from torchmn.exchange.options import GradientOptions
from torchmn.exchange.parameter_hook import owners_of
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replica_divergence import buffers_of_replicas
from torchmn.exchange.replicas import (
    broadcast_and_verify,
    broadcast_optimizer_state,
    load_inner_state,
    named_parameters,
    parameters_of,
    raise_if_ranks_differ,
)
from torchmn.exchange.resharding import raise_if_other_optimizer
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.sparse_gradients import sparse_parameters
from torchmn.exchange.weights import Contribution
from torchmn.nn.batch_norm import weigh_losses_by
from torchmn.nn.chain_list import MultiNodeChainList
from torchmn.nn.clipping import clip_grad_norm_


class MultiNodeOptimizer(WrappedOptimizer):
    """Made by `create_multi_node_optimizer`. It is a `torch.optim.Optimizer`.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, and reading
    them never waits. When ``backward()`` returns, every ``p.grad`` holds the mean over ranks (under
    double buffering the mean of the step before; under local updates it is the rank's own).

    Attributes:
        inner: the optimizer that was wrapped.
        communicator: the ranks, and the route between them.
        schedule: when ranks exchange gradients or parameters.
        reducer: sums the gradients.
        tuner: with ``auto``, selects schedule and codec; else None.

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
        *,
        tuner: Autotuner | None = None,
    ) -> None:
        _raise_if_attached(schedule)
        raise_if_it_has_no_hooks(inner)
        self.inner = inner
        self.communicator = comm
        training_steps(comm).expect()
        self.schedule = schedule
        self.tuner = tuner
        self._models = models = list(models)  # what refers to them need not refer to this
        self._is_joining = False
        self._is_closed = False
        self._options = options
        weight = options.weight or "rank"
        self._remove_step_hook: Callable[[], None] | None = None
        self._has_closure = False
        """Whether the inner optimizer's step calls what computes gradients."""
        self._hooks = ModelHooks()
        self._first_forward = ModelHooks()
        self._has_local_passes = False
        """Whether p.grad may hold gradients of passes under no_sync()."""
        self._asked = {
            "schedule": schedule.name if tuner is None else "auto",
            "codec": codec.name if codec is not None else None,
            "zero_fill": options.zero_fill,
            "weight": weight,
            "reduction": options.reduction,
            "max_grad_norm": options.max_grad_norm,
        }
        self._counts_samples = False
        self._uncounted_steps = UncountedSteps()
        self._has_checked_untrained = False
        self._late_scaler_steps = LateScalerSteps()
        self._taken_over_by = ""
        self._named = named = list[NamedParameter]()
        """The parameters that were unified last."""
        loaders = divided_batches(comm)
        self._unify()
        self.reducer = GradientReducer(
            comm,
            codec,
            lambda: named_parameters(inner, models, named),
            in_groups=lambda: parameters_of(inner),
            num_sets=schedule.traits.num_sets,
            on_backward_end=self._on_backward_end(schedule),
            zero_fill=options.zero_fill,
            reduction=options.reduction,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            contribution=Contribution(
                is_by_samples=weight == "samples", loaders=loaders, size=comm.size
            ),
            find_sparse=lambda: sparse_parameters(models),
            find_untrained=lambda: untrained_parameters(inner, models),
            find_buffers=lambda: buffers_of_replicas(models),
            on_nonfinite=self._act_on_problem,
            agreements=lambda: _agreements(inner),
            owner=self,
        )
        loaders.facts.append(ref(self.reducer.replicas))
        try:
            self._attach_schedule()
            if tuner is not None:
                tuner.attach(self, self._switch)
            self._remove_step_hook = before_step(inner, self._before_step)
            # With this the model also keeps the optimizer: gradients are exchanged even if nothing
            # else refers to it.
            self._hooks.before_copy(self._models[0], self._remove_eager_step)
            watched = self._models if schedule.traits.has_own_steps else []
            self._block_reads = BlockReads(comm, schedule, watched, self._hooks)
            for model in self._models:
                self._hooks.before_load(model, lambda: self.schedule.before_access("load"))
            if weight == "samples" or schedule.traits.counts_samples:
                self._count_samples()
            self._first_forward = watch_first_forward(self._models)
            self.recorded = RecordedSteps(self, self._models)
            self.recorded.meet()
        except BaseException:
            self.reducer.close()  # nothing else will
            self._unhook()
            raise

    def _on_backward_end(self, schedule: Schedule) -> Callable[[], None]:
        ended = schedule.backward_ended
        return ended if self.tuner is None else self.tuner.timed(ended)

    def _attach_schedule(self) -> None:
        schedule = self.schedule
        schedule.attach(self.reducer, self.inner, self._models)

    def _switch(self, schedule: Schedule, codec: Codec | None, bucket_bytes: int) -> None:
        """Continue with another schedule, codec and bucket size. *Collective*, between two steps.

        Pending updates are applied first; a codec with error feedback takes over the residuals.
        """
        self.schedule.flush()
        self.schedule.close()
        before, reducer = self.reducer.codec, self.reducer
        if codec is not None:
            codec = codec.new_instance()
        if isinstance(before, ErrorFeedback) and isinstance(codec, ErrorFeedback):
            codec.load_state_dict({"residuals": before.state_dict()["residuals"]})
        self.schedule = schedule
        reducer.reconfigure(
            reducer.comm,
            codec,
            num_sets=schedule.traits.num_sets,
            bucket_bytes=bucket_bytes,
            on_backward_end=self._on_backward_end(schedule),
        )
        self._attach_schedule()

    def _unhook(self) -> None:
        if self._remove_step_hook is not None:
            self._remove_step_hook()
        self._hooks.remove()
        self._first_forward.remove()

    # ---- what makes it an Optimizer ----

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales by itself. Read by `torch.amp.GradScaler.step` only.

        *Collective* on a rank without a backward pass, see `LateScalerSteps`.

        Raises UnsupportedError: a mean of another step has been scaled by another factor.
        """
        self._meet_scaler()
        return self._late_scaler_steps.take_part(self)

    def _meet_scaler(self) -> None:
        if self.schedule.traits.staleness_steps:
            raise UnsupportedError(
                f"GradScaler and {self.schedule.name} cannot be combined: the gradient in p.grad "
                "is of an earlier step and carries that step's scale. Use schedule='every_step', "
                "or bfloat16, which needs no scaling."
            )
        if self.tuner is not None:
            self.tuner.scaler_used()

    def __repr__(self) -> str:
        parts = [self.schedule.name]
        if self._asked["codec"] is not None:
            between = self.communicator.route.codec_scope or "no ranks"
            parts.append(f"{self._asked['codec']} between {between}")
        return f"MultiNodeOptimizer({', '.join(parts)}, {self.communicator!r}, {self.inner!r})"

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's; a mean that no step has applied is dropped. Local."""
        if self.tuner is not None:
            self.tuner.on_zero_grad()
        self.reducer.on_zero_grad()
        self._follow_groups()
        self.inner.zero_grad(set_to_none)
        self._has_local_passes = False

    @not_compiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. *Collective*: all ranks make the same number of steps.

        A rank without a backward pass takes part with zeros, and takes over the gradients of a
        rank that had one as they are now, clipped for instance. Where it cannot (shards of
        parameters, optimizers that share a backward pass, double buffering) the other ranks raise
        RankMismatchError if their script has changed them: use ``max_grad_norm`` there. A closure's
        loss is averaged over ranks (added, where gradients are), so that optimizers that use it
        (LBFGS) decide the same on all ranks. Under local updates ranks may step as often as they
        have batches: they exchange where their samples fill a block. A closure's loss is the rank's
        own then.

        Raises:
            UsageError: the backward pass before raised, or another optimizer took the parameters.
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
        if "grad_scale" in vars(self) and not self._late_scaler_steps.unscale(self):
            return None  # as the scalers of the other ranks
        if not events.observers:
            result = self._step(closure)
        else:
            with self.recorded:
                result = self._step(closure)
        training_start.begin()  # where no forward pass was seen, as in compiled code
        return result

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        reducer = self.reducer
        reducer.passes.raise_if_unfinished()
        self._has_closure = closure is not None
        if closure is None:
            self._uncounted_steps.before_step(self)
        elif self._is_joining:
            raise UnsupportedError(
                "step(closure) inside join(): a rank that has left its loop cannot take part in "
                "the mean of the loss. Compute loss and gradients before step()."
            )
        else:
            closure = over_ranks(closure, reducer, self._make_ready_for_step)
            if self.tuner is not None:
                self.tuner.closure_given()
        result = self.schedule.step(closure)
        if reducer.is_needed and not self._has_checked_untrained:
            self._has_checked_untrained = True
            warn_of_untrained_parameters(self.communicator, reducer.parameters.untrained)
        reducer.end_step(are_replicas=self.schedule.traits.replica_consistency == "per_step")
        training_steps(self.communicator).add()
        self._has_local_passes = False
        self._block_reads.end_step()
        self._follow_groups()
        if self.tuner is not None:
            self.tuner.step_ended()
        return result

    def replicated_tensors(self) -> list[Tensor]:
        """The parameters, where the schedule promises the same bits on all ranks now. Local.

        Empty where replicas differ by design: what a replica check may compare.
        """
        self._remove_eager_step()
        if self.schedule.traits.replica_consistency != "per_step":
            return []
        return [*parameters_of(self.inner)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's. *Collective.*

        All ranks take rank 0's parameters, buffers and optimizer state. Raises UsageError: a
        parameter is not in the model; the group is then not added.
        """
        self._remove_eager_step()
        if self.schedule.traits.replica_consistency != "per_step":
            self.schedule.flush()  # or what other ranks have learned would be overwritten
        self.inner.add_param_group(param_group)
        try:
            self._unify()
        except TorchmnError:
            self.inner.param_groups.pop()
            raise
        self.reducer.rebuild()
        self.schedule.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """The inner state, which a plain optimizer loads too; under ``torchmn`` our own.

        Each rank has its own: save it on every rank, between two steps or, with `no_sync`, between
        two of the passes of one. On the same number of ranks every rank loads its own and continues
        as if nothing had been; on another number see `reshard_state_dict`. Local; what is under way
        is awaited.
        """
        self._block_reads.note_checkpoint()
        state = resume.save(
            self.inner, self.schedule, self.reducer, has_local_passes=self._has_local_passes
        )
        if self.tuner is not None:
            state["torchmn"]["tuner"] = self.tuner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own state or a plain optimizer's. All ranks must call it, or none.

        Local, but *collective* under ``auto``, and where no optimizer trains some of the parameters
        that were exchanged. Raises UsageError: the state of another schedule or of another class of
        optimizer.
        """
        self._block_reads.note_checkpoint()
        ours = state_dict.get("torchmn", {})
        raise_if_other_optimizer(self.inner, state_dict, ours.get("optimizer", ""))
        self._remove_eager_step()
        if self.tuner is not None:
            self.tuner.load_state_dict(ours.get("tuner", {}))
        own = resume.schedule_state(state_dict, self.schedule)
        load_inner_state(self.inner, {k: v for k, v in state_dict.items() if k != "torchmn"})
        if ours.get("progress", {}).get("has_untrained"):
            self.reducer.find_untrained()
        self.schedule.load_state_dict(own)
        self.reducer.load_state_dict(ours.get("codec", {}), ours.get("progress", {}))
        resume.load_accumulated(self.reducer, ours.get("accumulated"))
        self._has_local_passes = "accumulated" in ours

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, made from `state_dict` of all old ranks. Local, pure.

        ``states`` are in rank order, and there may be more or fewer than there are ranks now.
        Residuals, pending means, anchors and half full blocks are distributed again (see
        `torchmn.exchange.resharding`). Where ranks' parameters differ, in the middle of a block,
        the state holds what the parameters become, so load the models before the optimizer: any
        old rank's.
        Raises UsageError: the old ranks were saved at different places.
        """
        schedule, tuner = self.schedule, self.tuner
        ours = [state.get("torchmn", {}) for state in states]
        is_tuned = tuner is not None and all("tuner" in own for own in ours)
        if tuner is not None and is_tuned:
            make = tuner.space.schedules.get(ours[0]["schedule"])
            schedule = make() if make is not None else schedule
        state = resume.reshard(states, comm, schedule, self.reducer.exchange.reduction)
        if tuner is not None and is_tuned:
            state["torchmn"]["tuner"] = tuner.reshard_state_dict([own["tuner"] for own in ours])
        return state

    def resume_warnings(self) -> list[str]:
        """What does not hold when a state is loaded by another number of ranks. Local."""
        return resume.other_size_warnings(
            self.schedule, self.tuner, codec=self._asked["codec"], models=self._models
        )

    # ---- what a plain optimizer has not ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here; the first backward pass outside exchanges the sum. Local.

        Without one `step` does; gradients that a script changes before, as by clipping, are this
        rank's own then: a warning, or, if others had such a pass, RankMismatchError from `step`.
        """
        self._has_local_passes = True
        local_passes = self.reducer.local_passes
        with local_passes.no_sync():
            yield

    def set_weight(self, weight: float) -> None:
        """The weight of this rank in the next mean: its number of samples or tokens. Local.

        The mean over ranks is sum(w_i g_i) / sum(w_i) with g_i the local mean. Applies to the next
        backward pass only; under local updates to the next step, where it takes the place of the
        samples that were counted. Batch normalization over ranks follows it.

        Raises UsageError: negative or not finite, or neither 0 nor 1 where gradients are summed.
        """
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a non-negative finite number.")
        if self.reducer.exchange.reduction == "sum" and weight not in (0, 1):
            raise UsageError(
                f"set_weight({weight}) with reduction='sum': gradients are added as they are. "
                "Multiply the loss, or use reduction='mean', which divides by the weights. "
                "(Weight 0 leaves this rank out.)"
            )
        self.reducer.contribution.set(float(weight), float(weight))
        if not self.schedule.traits.has_own_steps:
            self._weigh_losses()

    @not_compiled
    def _weigh_losses(self) -> None:
        """Let layers that communicate in backward use the weight, if it is known. Local."""
        reducer = ref(self.reducer)  # layers live longer than an optimizer

        def loss_weight() -> float | None:
            found = reducer()
            return None if found is None else found.contribution.loss_weight

        for model in self._models:
            weigh_losses_by(model, loss_weight)

    def follow_batches(self) -> None:
        """Weight the ranks by their parts of batches, in steps that are of a loader's. Local.

        Batch normalization over ranks follows it. See `torchmn.scatter_loader`.
        """
        self.reducer.contribution.follows_batches = True
        divided_batches(self.communicator).when_used(self, MultiNodeOptimizer._loader_is_there)

    def _loader_is_there(self) -> None:
        if self._is_closed:
            return
        self._count_samples()
        if not self.schedule.traits.has_own_steps:
            self.reducer.exchange.forget_scale()  # samples are another unit than ranks
            self._weigh_losses()

    def _count_samples(self) -> None:
        """Count the samples that the first model sees, from the first call of this on. Local."""
        if self._counts_samples:
            return
        self._counts_samples = True
        contribution, model = self.reducer.contribution, self._models[0]
        self._hooks.before_forward(model, self._before_forward)
        self._hooks.before_forward(model, contribution.count)
        self._hooks.show_to_compiler(model)
        if isinstance(model, MultiNodeChainList):  # its forward_backward does not call it
            model.register_count(contribution.add)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop that may end earlier on some ranks, as `torch.distributed.algorithms.Join`.

        *Collective.* A rank that has left its loop takes part in the others' exchanges with weight
        0, so that means are over the ranks that still have data.

        When all have left, the ranks that ended early take parameters, buffers and optimizer state
        from one that ran to the end; they must update what is outside the optimizer, such as a
        learning rate scheduler, themselves. Under local updates the last, partial block is
        exchanged instead, and each rank keeps its own buffers and optimizer state.

        No other collective may be called inside. Raises UnsupportedError: a closure is given to
        `step` inside.
        """
        self._is_joining = self.reducer.contribution.is_joining = True
        try:
            with joined(self, self._models):
                yield
        finally:
            self._is_joining = self.reducer.contribution.is_joining = False

    def flush(self) -> None:
        """Apply what was exchanged but not applied, and end a partial block. *Collective.*

        Afterwards all ranks hold the same parameters.
        """
        self.schedule.flush()

    def serve(self) -> bool:
        """On a rank that only serves (`ParameterServer`) serve until all workers have left `join`.

        *Collective*, with `join` on the workers. Returns whether this rank is one that serves; on
        the others, which train, it returns at once.
        """
        if self.schedule.traits.serves:
            with self.join():
                pass
        return self.schedule.traits.serves

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the current gradients by their global norm; returns the norm before. Local.

        *Collective over the ranks of the model* where it is sharded; the norm is that of the whole.
        """
        return clip_grad_norm_(parameters_of(self.inner), max_norm, norm_type)

    @property
    def nonfinite(self) -> list[NonfiniteGradients]:
        """Every step whose gradients were not finite on some rank: step, ranks, parameters."""
        return self.reducer.exchange.nonfinite.problems

    def close(self) -> None:
        """Release the model, to train it by itself or make another optimizer for it. Local."""
        self._is_closed = True
        self._block_reads.close()
        self.schedule.close()
        self.reducer.close_for_good()
        self.recorded.close()
        self._unhook()

    # ---- inside ----

    def _unify(self) -> None:
        """Take over the parameters that the inner optimizer has now. *Collective.*"""
        self._take_parameters_over()  # an older one may hold a step of its own in parameters
        raise_if_ranks_differ(self.communicator, self._models, self.inner, self._asked)
        broadcast_and_verify(self.communicator, self._models)
        broadcast_optimizer_state(self.communicator, self.inner)
        self._in_groups = parameters_of(self.inner)

    def _follow_groups(self) -> None:
        """Unify again if the script has put other parameters into the groups. *Collective* then.

        Gaussian splatting replaces all of them between steps; other scripts append to a group.
        """
        now = parameters_of(self.inner)
        if self._is_closed or [*map(id, now)] == [*map(id, self._in_groups)]:
            return
        if self.schedule.traits.replica_consistency != "per_step":
            raise UnsupportedError(
                f"{self.communicator.rank_label}: other parameters were put into the optimizer's "
                f"groups, which {self.schedule.name} cannot follow: call flush() and close() "
                "before that, and create_multi_node_optimizer(optimizer.inner, ...) after it."
            )
        self._remove_eager_step()
        self._unify()
        self.reducer.rebuild()
        self.schedule.rebuild()

    def _before_forward(self, model: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._follow_groups()

    @property
    def _label(self) -> str:
        return f"the multi-node optimizer of {type(self.inner).__name__} ({self.schedule.name})"

    def _take_parameters_over(self) -> None:
        """Close the multi-node optimizers that train our parameters. *Collective.*

        Those that only exchange them, because nothing trained them, stop exchanging them.
        """
        self._named[:] = named_parameters(self.inner, self._models, self._named)
        ours = [parameter for _, parameter in self._named]
        for reducer in owners_of(ours):
            older = reducer.owner if isinstance(reducer, GradientReducer) else None
            if not isinstance(older, MultiNodeOptimizer) or older is self:
                continue
            if set(ours).isdisjoint(parameters_of(older.inner)):
                older._remove_eager_step()
                older.reducer.release(set(ours))
            else:
                older._taken_over_by = self._label
                older.close()

    def _before_step(self) -> None:
        """Called before the inner optimizer's step, which a GradScaler skips if need be."""
        passes = self.reducer.passes
        if passes.are_inside:
            raise UnsupportedError(
                f"{self.communicator.rank_label}: {type(self.inner).__name__}.step() was called "
                "inside of backward(), by a hook on a parameter (gradient release, optimizer in "
                "backward), where means over ranks are not known yet. Leave such hooks out, and "
                "call step() after backward()."
            )
        if not self._has_closure:
            self._make_ready_for_step()

    def _make_ready_for_step(self) -> None:
        """All that is done to gradients before the inner optimizer sees them."""
        if not self.reducer.is_needed:
            exchange = self.reducer.exchange
            exchange.fill_missing()
            if not self.reducer.is_suspended:
                record_own_nonfinite(self.reducer, parameters_of(self.inner))
        self._act_on_problem()
        if self._options.max_grad_norm is not None:
            self.clip_grad_norm_(self._options.max_grad_norm)

    def _act_on_problem(self) -> None:
        act_on_nonfinite(self.reducer, self._options.on_nonfinite)

    def _remove_eager_step(self) -> None:
        self.schedule.before_access("read")


def _agreements(inner: Optimizer) -> list[Agreement]:
    """What ranks must have in common, beside what the reducer knows; for each set of buckets."""
    return [LearningRates(inner)]


def _raise_if_attached(schedule: Schedule) -> None:
    if "_reducer" in vars(schedule):
        raise UsageError(
            f"This {type(schedule).__name__} object belongs to another optimizer already, whose "
            "state it holds. Make a new schedule object for each optimizer."
        )


def measure_norms(optimizer: MultiNodeOptimizer, listener: NormListener) -> None:
    """Give a listener the norms of gradients, and count samples for it. Local.

    Raises UsageError: there is one already; UnsupportedError: the model is a chain over ranks.
    """
    comm, exchange = optimizer.communicator, optimizer.reducer.exchange
    if find_chains(optimizer._models, comm, None):
        raise UnsupportedError(
            f"{comm.rank_label}: the norm of a gradient is that of all parameters, and the modules "
            "of this chain are on several ranks. Measure with a model that is whole on each rank."
        )
    if exchange.norm_listener is not None:
        raise UsageError(
            "The norms of this optimizer's gradients are measured already. Use the "
            f"{type(exchange.norm_listener).__name__} that was made first."
        )
    exchange.norm_listener = listener
    optimizer._count_samples()
