"""The optimizer that users see: theirs, with gradients that are means over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.compression import Codec
from torchmn.errors import NonFiniteGradientError, TorchmnError, UnsupportedError, UsageError
from torchmn.gradients.bucket_set import NonfiniteGradients, Reduction
from torchmn.gradients.contribution import Contribution
from torchmn.gradients.model_hooks import ModelHooks
from torchmn.gradients.parameter_hook import owners_of
from torchmn.gradients.reducer import GradientReducer
from torchmn.gradients.replicas import (
    broadcast_and_verify,
    broadcast_optimizer_state,
    copy_state_from_rank,
    named_parameters,
    raise_if_ranks_differ,
)
from torchmn.gradients.sparse_gradients import sparse_parameters
from torchmn.optimizer.unmanaged_parameters import warn_of_gradients_of_others
from torchmn.resharding import (
    mean_state,
    notes_of,
    reshard_codec,
    reshard_inner,
    reshard_object,
)
from torchmn.schedules.base import LOOKED_AT_BY_SCALER, DefersUpdates, Schedule

_NOT_THE_SCHEDULES = ("schedule", "codec", "progress", "accumulated")
"""What of our part of the state is the optimizer's own."""
Weight = Literal["rank", "samples"]
OnNonfinite = Literal["raise", "warn", "pass"]


class MultiNodeOptimizer(Optimizer):
    """Made by `create_multi_node_optimizer`. It is a `torch.optim.Optimizer`.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects. When
    ``backward()`` returns, every ``p.grad`` holds the mean over ranks (under double buffering the
    mean of the step before; under the schedules by blocks it is the rank's own).
    """

    def __init__(
        self,
        inner: Optimizer,
        comm: Communicator,
        models: Sequence[nn.Module],
        schedule: Schedule,
        codec: Codec | None,
        *,
        zero_fill: bool,
        weight: Weight,
        reduction: Reduction,
        on_nonfinite: OnNonfinite,
        max_grad_norm: float | None,
        gradient_as_bucket_view: bool,
    ) -> None:
        _raise_if_attached(schedule)
        # Optimizer.__init__ would make groups and state of its own; ours are the inner one's.
        self.inner = inner
        self._deferring: DefersUpdates | None = None
        self.communicator = comm
        comm.num_steps = comm.num_steps or 0
        self.schedule = schedule
        self._models = list(models)
        self._weight_kind = weight
        self._num_exchanges = 0
        self._exchanged_weight = 0.0
        """Of this rank, in all exchanges since a closure was called."""
        self._is_joining = False
        self._on_nonfinite = on_nonfinite
        self._max_grad_norm = max_grad_norm
        self._step_hook: RemovableHandle | None = None
        self._has_closure = False
        """Whether gradients come of what the inner optimizer's step calls."""
        self._hooks = ModelHooks()
        self._has_local_passes = False
        """Whether p.grad may hold gradients of passes under no_sync()."""
        self._asked = {
            "schedule": schedule.name,
            "codec": codec.name if codec is not None else None,
            "zero_fill": zero_fill,
            "weight": weight,
            "reduction": reduction,
            "max_grad_norm": max_grad_norm,
        }
        self._has_looked_at_others = False
        """Whether it was looked for gradients that are not exchanged."""
        self._taken_over_by = ""
        self._take_parameters_over()  # an older one may have to complete what `_unify` broadcasts
        self._unify()
        self.reducer = GradientReducer(
            comm,
            codec,
            lambda: named_parameters(inner, self._models),
            zero_fill=zero_fill,
            num_sets=schedule.num_sets,
            on_backward_end=self._backward_ended,
            gradient_as_bucket_view=gradient_as_bucket_view,
            reduction=reduction,
            find_sparse=lambda: sparse_parameters(self._models),
        )
        self.reducer.contribution = Contribution(is_by_samples=weight == "samples")
        try:
            self._attach(max_grad_norm)
        except BaseException:
            self.reducer.close()  # nobody else will
            self._unhook()
            raise

    def _attach(self, max_grad_norm: float | None) -> None:
        schedule, inner = self.schedule, self.inner
        self.reducer.on_nonfinite_callback = self._act_on_problem
        schedule.attach(self.reducer, inner)
        self._deferring = schedule if isinstance(schedule, DefersUpdates) else None
        if self._deferring is not None:
            sync_reason = None if max_grad_norm is None else "max_grad_norm needs all gradients"
            self._deferring.install_hooks(self._models, sync_reason)
        self._step_hook = inner.register_step_pre_hook(self._before_step)
        # With this the model also keeps the optimizer: gradients are exchanged even if nobody else
        # has it.
        self._hooks.before_copy(self._models[0], self._complete)
        if self._weight_kind == "samples" or schedule.counts_samples:
            self._hooks.eager_parameters(self._models[0], self.reducer.contribution.count)

    def _unhook(self) -> None:
        if self._step_hook is not None:
            self._step_hook.remove()
        self._hooks.remove()

    # ---- what makes it an Optimizer ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own. Whoever reads them may be about to look at gradients."""
        self._await_gradients("param_groups was read between backward() and step()")
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's own."""
        self._complete()
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's own."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet: __init__ has not run, as in copying
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "A multi-node optimizer cannot be copied or pickled: it holds connections to the other "
            "ranks. Save its state_dict(), or copy optimizer.inner."
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales by itself: no. Asked by `torch.amp.GradScaler.step` only.

        Raises UnsupportedError: a mean of another step has been scaled by another factor.
        """
        if self.schedule.staleness_steps:
            raise UnsupportedError(
                f"GradScaler and {self.schedule.name} do not go together: the gradient in p.grad "
                "is of an earlier step and carries that step's scale. Use schedule='every_step', "
                "or bfloat16, which needs no scaling."
            )
        self._await_gradients(LOOKED_AT_BY_SCALER)
        return False

    def __repr__(self) -> str:
        parts = [self.schedule.name]
        if self._asked["codec"] is not None:
            between = self.communicator.encodes_between or "nobody"
            parts.append(f"{self._asked['codec']} between {between}")
        return f"MultiNodeOptimizer({', '.join(parts)}, {self.communicator!r}, {self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's. Local."""
        self.schedule.on_zero_grad()
        self.reducer.on_zero_grad()
        self.inner.zero_grad(set_to_none)
        self._has_local_passes = False

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. *Collective*: every rank calls it equally often.

        A rank without a backward pass takes part with zeros. A closure's loss is averaged over
        ranks (added, where gradients are), so that optimizers which look at it (LBFGS) decide alike
        everywhere. Raises what an exchange raises.

        Under the schedules by blocks ranks may step as often as they have batches: they meet where
        their samples fill a block. A closure's loss is the rank's own then.
        """
        if self._taken_over_by:
            raise UsageError(
                f"{self.communicator.rank_label}: {self._label} gave its parameters to "
                f"{self._taken_over_by}, which was made later for some of the same parameters: "
                "only one multi-node optimizer can exchange the gradient of a parameter. Step the "
                "newer one, or make one optimizer with several parameter groups."
            )
        self.reducer.raise_if_unfinished()
        if closure is None:
            self._raise_if_uncounted()
        self._has_closure = closure is not None
        result = self.schedule.step(None if closure is None else self._mean_loss(closure))
        if not self.reducer.is_needed:  # no backward pass does it
            self.reducer.contribution.reset()
        self.reducer.contribution.end_step()
        if self.reducer.is_needed and not self._has_looked_at_others:
            self._has_looked_at_others = True
            warn_of_gradients_of_others(self.communicator, self._models)
        self.reducer.step += 1
        self.communicator.num_steps = (self.communicator.num_steps or 0) + 1
        self._has_local_passes = False
        return result

    def replicated_tensors(self) -> list[Tensor]:
        """The parameters, where the schedule promises the same bits on all ranks now. Local.

        Empty where replicas differ by design: what a replica check may compare.
        """
        self._complete()
        if self.schedule.replica_consistency != "per_step":
            return []
        return [p for group in self.inner.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's. *Collective*: rank 0's parameters and buffers are taken over.

        Raises UsageError: a parameter is not in the model. The group is then not added.
        """
        self._complete()
        if self.schedule.replica_consistency != "per_step":
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
        """The inner state, which a plain optimizer loads too; under ``torchmn`` what is ours.

        Each rank has its own: save it on every rank, between two steps or, with `no_sync`, between
        two of the passes of one. On as many ranks every rank loads its own, and goes on as if
        nothing had been; on another number see `reshard_state_dict`.
        """
        ours = self.schedule.state_dict()  # first: it waits for what is under way
        state = self.inner.state_dict()
        state["torchmn"] = {
            "schedule": self.schedule.name,
            "codec": self.reducer.state_dict(),
            "progress": self.reducer.progress(),
            **({"accumulated": self._accumulated()} if self._has_local_passes else {}),
            **ours,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own state or a plain optimizer's. Raises UsageError: another schedule's."""
        ours = dict(state_dict.get("torchmn", {}))
        saved = ours.pop("schedule", self.schedule.name)
        codec, progress = ours.pop("codec", {}), ours.pop("progress", {})
        accumulated = ours.pop("accumulated", None)
        # A plan is a matter of speed alone.
        if ours.keys() - {"plan"} and saved != self.schedule.name:
            raise UsageError(
                f"This state was saved with schedule {saved!r} and holds something that "
                f"{self.schedule.name!r} would lose. Call flush() before saving, or use {saved!r}."
            )
        self._complete()
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "torchmn"})
        self.reducer.has_loaded = True
        self.schedule.load_state_dict(ours if saved == self.schedule.name else {})
        self.reducer.load_state_dict(codec)
        self.reducer.load_progress(progress)
        self._load_accumulated(accumulated)

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, made from `state_dict` of all old ranks. Local, pure.

        ``states`` are in rank order, and there may be more or fewer than there are ranks now. What
        is owed to the model, pending means, anchors and half full blocks are shared out anew (see
        `torchmn.resharding`). Where ranks' parameters differ, in the middle of a block, the
        state holds what the parameters become, so load the models before the optimizer: any old
        rank's. Raises UsageError: the old ranks were saved at different places.
        """
        ours = [state.get("torchmn", {}) for state in states]
        state = reshard_inner(states)
        if not all(ours):
            return state
        schedules = [{k: v for k, v in own.items() if k not in _NOT_THE_SCHEDULES} for own in ours]
        is_same = ours[0]["schedule"] == self.schedule.name
        state["torchmn"] = {
            "schedule": ours[0]["schedule"],
            "codec": reshard_codec([own["codec"] for own in ours], comm),
            # The unit of weights suits as many ranks as there were; the new ones agree on theirs.
            "progress": {**ours[0]["progress"], "unit": None} if "progress" in ours[0] else {},
            **(reshard_object(self.schedule, schedules, comm) if is_same else schedules[0]),
        }
        accumulated = [own["accumulated"] for own in ours if "accumulated" in own]
        if accumulated:
            state["torchmn"]["accumulated"] = _shared_out(
                accumulated, comm.size, self.reducer.reduction
            )
        return state

    def resume_warnings(self) -> list[str]:
        """What does not hold when a state is loaded by another number of ranks, in sentences."""
        notes = notes_of(self.schedule)
        if self._asked["codec"] is not None:
            notes.append(
                f"What {self._asked['codec']} owes to the model is kept, but gradients are "
                "rounded in other parts: the run takes a path of its own, as with another seed."
            )
        if any(True for model in self._models for _ in model.buffers()):
            notes.append(
                "Buffers that differ between ranks, such as running statistics of batch "
                "normalization, become those of rank 0, as when the optimizer is made."
            )
        return notes

    # ---- what is ours ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here; the first backward pass outside exchanges the sum. Local."""
        before, self.reducer.is_syncing = self.reducer.is_syncing, False
        self._has_local_passes = True
        try:
            yield
        finally:
            self.reducer.is_syncing = before

    def set_weight(self, weight: float) -> None:
        """The weight of this rank in the next mean: its number of samples or tokens. Local.

        The mean over ranks is sum(w_i g_i) / sum(w_i) with g_i the local mean. It holds for the
        next backward pass only; under the schedules by blocks for the next step, where it takes the
        place of the samples that were counted. Raises UsageError: negative or not finite, or
        neither 0 nor 1 where gradients are summed.
        """
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a non-negative finite number.")
        if self.reducer.reduction == "sum" and weight not in (0, 1):
            raise UsageError(
                f"set_weight({weight}) with reduction='sum': gradients are added as they are. "
                "Multiply the loss, or use reduction='mean', which divides by the weights. "
                "(Weight 0 leaves this rank out.)"
            )
        self.reducer.contribution.set(float(weight), float(weight))

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop that may end earlier on some ranks. *Collective.*

        A rank that has left its loop takes part in the others' exchanges with weight 0, so that
        means are over the ranks that still have data. When all have left, the ranks that ended
        early take over parameters, buffers and optimizer state of one that ran to the end; what
        lives outside the optimizer, as a learning rate scheduler, they bring up to date themselves.
        Under the schedules by blocks the last, partial block is agreed on in place of that, and
        each rank keeps its own buffers and optimizer state. Inside, no other collective may be
        called, and no closure be given to `step`.
        """
        reducer = self.reducer
        num_before = self._num_exchanges
        self._is_joining = True
        try:
            yield
            reducer.is_active = False
            while self.schedule.shadow_step():
                pass
        finally:
            reducer.is_active, self._is_joining = True, False
        reducer.contribution.reset()
        reducer.forget_weights()
        comm = self.communicator
        everybody = comm.allgather_obj((self._num_exchanges - num_before, reducer.step))
        last = max(num for num, _ in everybody)
        if self.schedule.replica_consistency == "per_step":
            self.schedule.flush()
            if any(num < last for num, _ in everybody):
                self._take_over(next(r for r, (num, _) in enumerate(everybody) if num == last))
        reducer.step = max(step for _, step in everybody)

    def flush(self) -> None:
        """Apply what was exchanged but not applied, and end a partial block. *Collective.*

        Afterwards all ranks hold the same parameters.
        """
        self.schedule.flush()

    def synchronize(self) -> None:
        """Make every ``p.grad`` the mean, where a schedule lets `backward` return before it is.

        Behind `step` it applies what is not applied yet. Local.
        """
        self._await_gradients(None)
        self._complete()

    @property
    def is_server(self) -> bool:
        """Whether this rank only serves the others and trains nothing (`ParameterServer`)."""
        return bool(getattr(self.schedule, "is_server", False))

    def serve(self) -> None:
        """On a rank that `is_server`, in place of a loop that the workers have in `join`."""
        if not self.is_server:
            raise UsageError(
                f"{self.communicator.rank_label}: serve() is for ranks that do nothing else, of "
                "schedule=ParameterServer(servers=k). Ask optimizer.is_server."
            )
        with self.join():
            pass

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients in hand by their global norm; returns the norm before. Local."""
        self._await_gradients("clip_grad_norm_ needs all gradients")
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def nonfinite(self) -> list[NonfiniteGradients]:
        """Every step whose gradients were not finite on some rank: step, ranks, parameters."""
        return self.reducer.problems

    def close(self) -> None:
        """Leave the model alone, to train it by itself or make another optimizer for it. Local."""
        self.schedule.close()
        self.reducer.close()
        self._unhook()

    # ---- inside ----

    def _unify(self) -> None:
        raise_if_ranks_differ(self.communicator, self._models, self.inner, self._asked)
        broadcast_and_verify(self.communicator, self._models)
        broadcast_optimizer_state(self.communicator, self.inner)

    @property
    def _label(self) -> str:
        return f"the multi-node optimizer of {type(self.inner).__name__} ({self.schedule.name})"

    def _take_parameters_over(self) -> None:
        """Close the multi-node optimizers that exchange gradients of our parameters. Local."""
        for owner in owners_of(p for _, p in named_parameters(self.inner, self._models)):
            if isinstance(owner, GradientReducer) and isinstance(owner.owner, MultiNodeOptimizer):
                owner.owner._taken_over_by = self._label
                owner.owner.close()

    def _before_step(self, *_: object) -> None:
        """Called before the inner optimizer's step, which a GradScaler leaves out if need be."""
        if not self._has_closure:
            self._make_ready_for_step()

    def _make_ready_for_step(self) -> None:
        """All that is done to gradients before the inner optimizer sees them."""
        reducer = self.reducer
        if not (reducer.is_needed or reducer.is_suspended):
            self._look_at_own_gradients()
        self._act_on_problem()
        if self._max_grad_norm is not None:
            self.clip_grad_norm_(self._max_grad_norm)

    def _look_at_own_gradients(self) -> None:
        """One rank alone exchanges nothing, but what is not finite is found all the same."""
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        grads = {p: p.grad.detach().to_dense() for p in parameters if p.grad is not None}
        sums = [grad.sum().abs().double().cpu() for grad in grads.values()]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return
        names = [  # unless only a sum was too large
            name
            for name, parameter in self.reducer.parameters()
            if parameter in grads and not bool(grads[parameter].isfinite().all())
        ]
        if names:
            self.reducer.problem = NonfiniteGradients(self.reducer.step, {0: names})
            self.reducer.problems.append(self.reducer.problem)

    def _act_on_problem(self) -> None:
        problem, self.reducer.problem = self.reducer.problem, None
        if problem is not None and self._on_nonfinite != "pass":
            text = (
                f"{self.communicator.rank_label}: {problem}. Lower the learning rate, clip "
                "(max_grad_norm=), or scale the loss with torch.amp.GradScaler; on_nonfinite="
                "'warn' or 'pass' goes on all the same."
            )
            if self._on_nonfinite == "raise":
                raise NonFiniteGradientError(text)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _await_gradients(self, why: str | None) -> None:
        if self._deferring is not None:
            self._deferring.await_gradients(why)

    def _complete(self) -> None:
        if self._deferring is not None:
            self._deferring.complete()

    def _backward_ended(self) -> None:
        try:
            self.schedule.backward_ended()
        finally:
            self._num_exchanges += 1
            self._exchanged_weight += self.reducer.weight
            self.reducer.contribution.reset()

    def _raise_if_uncounted(self) -> None:
        if self.reducer.contribution.was_ever_known or not self.schedule.counts_samples:
            return
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise UsageError(
                f"{self.communicator.rank_label}: {self.schedule.name} counts samples, but the "
                "model's forward has seen no tensor with a batch dimension. Call "
                "optimizer.set_weight(number_of_samples) before step()."
            )

    def _mean_loss(self, closure: Callable[[], float]) -> Callable[[], float]:
        if self._is_joining:
            raise UnsupportedError(
                "step(closure) inside join(): a rank that has left its loop cannot take part in "
                "the mean of the loss. Compute loss and gradients before step()."
            )
        reducer = self.reducer
        given = reducer.contribution.given

        def mean_of_closure() -> float:
            num_before, self._exchanged_weight = self._num_exchanges, 0.0
            if given is not None:  # for every pass of this step
                reducer.contribution.set(*given)
            with torch.enable_grad():
                loss = closure()
            is_shared = reducer.is_needed
            if is_shared and self._num_exchanges == num_before:  # no backward pass on this rank
                reducer.exchange_now()
            self._make_ready_for_step()
            return self._loss_of_all(loss) if is_shared else loss

        return mean_of_closure

    def _loss_of_all(self, loss: float) -> float:
        """The ranks' losses, put together as their gradients were. *Collective.*"""
        weight = self._exchanged_weight
        value = loss.detach() if isinstance(loss, Tensor) else loss
        part = float(value) * weight if weight else 0.0  # the loss of nothing may be no number
        row = torch.tensor([part, weight], dtype=torch.float64, device="cpu")
        total, total_weight = self.reducer.comm.allreduce(row).tolist()
        mean = float(total if self.reducer.reduction == "sum" else total / total_weight)
        if isinstance(value, Tensor):  # as `loss.item()` is what users write
            return cast(float, torch.full_like(value, mean))
        return mean

    def _accumulated(self) -> dict[str, Any]:
        """The gradients of the passes under no_sync() so far, by name, and their weight."""
        reducer = self.reducer
        return {
            "gradients": {
                name: parameter.grad.detach().clone()
                for name, parameter in reducer.parameters()
                if parameter.grad is not None
            },
            "weight": reducer.weight,
            "num_samples": reducer.num_samples,
            "is_set": reducer.contribution.is_set,
        }

    def _load_accumulated(self, state: dict[str, Any] | None) -> None:
        self.reducer.contribution.reset()
        self._has_local_passes = state is not None
        if state is None:
            return
        for name, parameter in self.reducer.parameters():
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter).clone()
        self.reducer.contribution.resume(state["num_samples"])
        if state["is_set"] or self.reducer.weight != state["weight"]:
            self.reducer.contribution.set(state["weight"], state["num_samples"])

    def _take_over(self, source: int) -> None:
        tensors = [t for m in self._models for t in (*m.parameters(), *m.buffers())]
        copy_state_from_rank(self.communicator, tensors, self.inner, source)
        if self.communicator.rank != source:
            self.schedule.on_zero_grad()


def _shared_out(
    accumulated: Sequence[dict[str, Any]], num_new: int, reduction: Reduction
) -> dict[str, Any]:
    """Gradients of unfinished steps: each new rank has their mean, and an equal part of weights.

    Where gradients are summed it has an equal part of the sum.
    """
    weights = [state["weight"] for state in accumulated]
    gradients = mean_state([state["gradients"] for state in accumulated], weights)
    if reduction == "sum":
        gradients = {name: g * (sum(weights) / num_new) for name, g in gradients.items()}
        return {"gradients": gradients, "weight": 1.0, "num_samples": 0.0, "is_set": False}
    return {
        "gradients": gradients,
        "weight": sum(weights) / num_new,
        "num_samples": sum(state["num_samples"] for state in accumulated) / num_new,
        "is_set": any(state["is_set"] for state in accumulated),
    }


def _raise_if_attached(schedule: Schedule) -> None:
    if "_reducer" in vars(schedule):
        raise UsageError(
            f"This {type(schedule).__name__} object belongs to another optimizer already, whose "
            "state it holds. Make a new schedule object for each optimizer."
        )
