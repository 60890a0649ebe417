"""Every step, overlapped with backward and the next forward: layers are updated before they run.

    backward k:      buckets of late layers are sent while gradients of earlier ones are computed
    step k:          the options (lr, ...) are noted; what has arrived is applied
    forward k+1:     before layer l runs:  w_l <- update(w_l, mean(g_l), options), both of step k

The mathematics are those of `every_step`, and so are the bits if its buckets are the same:
no layer runs with parameters of the step before. What matters is the order in which buckets are
sent, see `bucket_order`; the first exchanges are as in `every_step` and are measured, then rank 0
chooses the order, and all ranks follow it from one exchange on.

Papers: see `bucket_order`. Differences: the order is static, since collectives need the same on all
ranks; nothing is sent to a server and nothing pulled; the weights of the ranks and the flag of
gradients that are not finite leave before what is deferred, so that `step` decides
the same on all ranks whether there is an update at all. docs/explain/next-forward.md explains what
waits for what.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.errors import TorchmnError, UsageError
from torchmn.gradients.bucket_set import BucketSet
from torchmn.gradients.late_ranks import share_with_late_ranks
from torchmn.gradients.mean_assignment import assign_sparse_means
from torchmn.gradients.nonfinite import NonfiniteGradients
from torchmn.gradients.reducer import GradientReducer
from torchmn.schedules.base import Schedule
from torchmn.schedules.next_forward.bucket_order import NUM_MEASURED, BucketOrder, OrderTuner
from torchmn.schedules.next_forward.deferred_updates import DeferredUpdates, update_sites
from torchmn.schedules.next_forward.partial_step import is_separable, sees_steps
from torchmn.schedules.next_forward.pending_gradient import MeansUnderWay, await_before_add
from torchmn.units import MiB

_USED = "gradients were used between backward() and step()"


class EveryStepNextForward(Schedule):
    """Synchronous SGD whose exchange overlaps with backward and the next forward.

    Args:
        chunk_bytes: the size of a bucket, at most.
        eager_parameters: names of parameters, or of modules for all of theirs, that are updated
            before the model runs at all. What several modules share is among them anyway.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = EveryStepNextForward()
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, schedule=schedule)
    """

    name = "every_step_next_forward"
    exchanges_shards = False
    updates_in_step = False
    num_warm_up_steps = NUM_MEASURED + 1
    """Before steps take the time that they will take."""

    def __init__(self, *, chunk_bytes: int = 2 * MiB, eager_parameters: Sequence[str] = ()) -> None:
        if chunk_bytes <= 0:
            raise UsageError(f"chunk_bytes={chunk_bytes} must be a positive number of bytes.")
        self.chunk_bytes = chunk_bytes
        self.eager_parameters = tuple(eager_parameters)
        self.plan: BucketOrder | None = None
        """None while exchanges are measured."""
        self.reasons: dict[str, None] = {}
        """Why something had to wait for all of an exchange, each once."""
        self._models: list[nn.Module] = []
        self._sync_reason: str | None = None
        self._tuner: OrderTuner | None = None
        self._updates = DeferredUpdates()
        self._readers: dict[nn.Parameter, set[nn.Module]] = {}
        # From backward to step: the sums under way, and the gradients that are in them.
        self._sums: BucketSet | None = None
        self._gradients: MeansUnderWay | None = None
        """Those of the last exchange, until the next one takes their memory."""
        self._is_exposed = False
        self._is_exchanged = False
        self._is_in_closure = False
        # From step to the next backward.
        self._unchecked: BucketSet | None = None
        """Sums that have not been checked for values that are not finite."""
        self._is_applied = False
        self._late_problem: NonfiniteGradients | None = None
        self._handles: list[RemovableHandle] = []

    # ---- Schedule ----

    def attach(self, reducer: GradientReducer, inner: Optimizer) -> None:
        """See `Schedule.attach`."""
        super().attach(reducer, inner)
        self._updates.rank_label = reducer.comm.rank_label
        if not is_separable(inner):
            self._sync_reason = (
                f"{type(inner).__name__} may look at all gradients at once (a class that updates "
                "each parameter from its own gradient alone declares is_separable = True)"
            )
        reducer.set_chunk_size(self.chunk_bytes, watcher=self)

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`."""
        reducer = self._reducer
        if self._is_exchanged:
            reducer.warn_of_second_pass()
        if self.plan is None or self._is_in_closure:
            reducer.reduce_remaining()
            reducer.means.assign(reducer.buffers.swap())
        else:
            reducer.start_remaining()
            has_all = all(slot.has_gradient for slot in reducer.filling.slots)
            self._sums, self._is_exposed = reducer.buffers.swap(), False
            present = set(self._sums.slot_of) if has_all else self._present_anywhere(self._sums)
            assign_sparse_means(self._sums)
            self._gradients = MeansUnderWay(reducer, self._sums, present, self._before_use)
        self._is_exchanged = True
        self._exchange_ended()

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`."""
        if closure is not None:
            return self._step_with(closure)
        reducer = self._reducer
        self.exchange_if_late()
        sums, self._sums, self._is_exchanged = self._sums, None, False
        if sums is not None:
            were_used = self._is_exposed
            if not self._is_exposed and self._gradients is not None:
                self._check_later(sums, is_applied=False)  # should this raise
                is_untouched = self._gradients.is_untouched
                were_used = not is_untouched
                why = sees_steps(self._inner, num_own_hooks=1) if is_untouched else _USED
                if why is None and self._defer(sums):
                    return None
                self._expose(why)
                self._unchecked = None
            reducer.means.note_late_ranks(sums, were_used=were_used)
            if sums.has_finite_gradients and sums.algorithm.codec is not None:
                # Whether a codec met values that are not finite is checked on all ranks together:
                # on other ranks the script may not have used a gradient.
                self._check_later(sums, is_applied=True)
            else:
                reducer.means.record_nonfinite(sums)
        if self._late_problem is not None:
            reducer.means.nonfinite.record(self._late_problem, is_known=True)
            self._late_problem = None
        share_with_late_ranks(reducer)
        self._inner.step()
        return None

    def exchange_if_late(self) -> None:
        """See `Schedule.exchange_if_late`."""
        if not self._is_exchanged or self._reducer.has_unexchanged:
            self._reducer.exchange_now(is_late=True)

    def shadow_step(self) -> int:
        """See `Schedule.shadow_step`."""
        means = self._reducer.shadow_exchange()
        share_with_late_ranks(self._reducer)
        self._exchange_ended()
        return means.num_active

    def on_zero_grad(self) -> None:
        """See `Schedule.on_zero_grad`. What is under way is not applied."""
        if self._is_exchanged:
            self._check_later(self._sums, is_applied=False)
        self._sums, self._is_exchanged = None, False

    def flush(self) -> None:
        """See `Schedule.flush`."""
        self.complete()
        self._check_last()

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`: all is applied first. The plan, which needs three exchanges.

        No bit depends on the plan: chunks are cut the same under each.
        """
        self.complete()
        if self.plan is None:
            return {}
        names, modules = self._names(), self._module_names()
        readers = {
            names[parameter]: [modules[module] for module in read_by if module in modules]
            for parameter, read_by in self._readers.items()
            if parameter in names
        }
        plan = {
            "order": list(self.plan.order),
            "num_early": self.plan.num_early,
            "readers": readers,
        }
        return {"plan": plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`. Without a plan that fits one is measured."""
        self.complete()
        self.on_zero_grad()
        saved = state.get("plan")
        if saved is None:
            return
        self.layout_changed()
        if self._tuner is None or len(saved["order"]) != len(self._reducer.buffers.sets[0].buckets):
            return
        modules = {name: module for module, name in self._module_names().items()}
        parameters = {name: parameter for parameter, name in self._names().items()}
        if not set(saved["readers"]) <= parameters.keys() or not all(
            set(read_by) <= modules.keys() for read_by in saved["readers"].values()
        ):
            return
        self._follow(
            BucketOrder(order=tuple(saved["order"]), num_early=saved["num_early"]),
            {
                parameters[name]: {modules[read_by] for read_by in names}
                for name, names in saved["readers"].items()
            },
        )

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """See `Resharding`: the plan was measured for the old ranks, a new one is made."""
        return {}

    # ---- DefersUpdates ----

    def install_hooks(self, models: Sequence[nn.Module], sync_reason: str | None) -> None:
        """See `DefersUpdates.install_hooks`."""
        self._models = list(models)
        self._sync_reason = self._sync_reason or sync_reason
        if self._sync_reason:
            self._warn_once(self._sync_reason)
        self.layout_changed()

    @property
    def has_pending_updates(self) -> bool:
        """See `DefersUpdates.has_pending_updates`."""
        return bool(self._updates)

    def await_gradients(self, reason: str | None = None) -> None:
        """See `DefersUpdates.await_gradients`."""
        if self._sums is not None and not self._is_exposed:
            self._expose(reason)

    def complete(self) -> None:
        """See `DefersUpdates.complete`."""
        self._updates.apply_all()
        for sums in (self._sums, self._unchecked):
            if sums is not None:
                sums.drain()  # for what codecs remember

    def close(self) -> None:
        """See `Schedule.close`. All is applied first, and every ``p.grad`` is its mean."""
        self.complete()
        if self._gradients is not None:
            with suppress(TorchmnError):  # of a failed exchange, which backward or step has raised
                self._gradients.resolve_held()
        self._unhook()
        self._reducer.forget_watcher()

    # ---- PassWatcher ----

    def gradient_arrived(self, parameter: Tensor) -> None:
        """See `PassWatcher.gradient_arrived`."""
        if self._updates:
            self._updates.raise_if_used(parameter)
        if self._tuner is not None:
            self._tuner.meter.gradient_arrived(parameter)

    def filling_begins(self) -> None:
        """See `PassWatcher.filling_begins`: nothing of the last exchange may be in flight."""
        if self._sums is not None:  # a second pass before step(), or a step was left out
            self._check_later(self._sums, is_applied=False)
            self._sums = None
        if self._gradients is not None:
            self._gradients.resolve_held()
        self._check_last()

    def filling_ends(self) -> None:
        """See `PassWatcher.filling_ends`. What is pending still was not used in this pass."""
        if self._tuner is not None:
            self._tuner.meter.backward_ended()
        self._updates.apply_all()

    def layout_changed(self) -> None:
        """See `PassWatcher.layout_changed`: measure again."""
        self.plan = None
        self._unhook()
        reducer = self._reducer
        if (
            reducer.is_needed
            and reducer.buffers.sets[0].buckets
            and self._models
            and not self._sync_reason
        ):
            self._tuner = OrderTuner(reducer, self._models, self._warn_once)

    # ---- inside ----

    def _present_anywhere(self, means: BucketSet) -> set[nn.Parameter]:
        """The parameters that have a mean, though some have no gradient on this rank."""
        if self._reducer.buffers.zero_fill:
            return set(means.slot_of)
        means.await_footer()
        return {p for p, flag in zip(means.slot_of, means.presence, strict=True) if flag}

    def _defer(self, means: BucketSet) -> bool:
        """Begin to apply this step, if it is to be applied. The same on all ranks."""
        means.await_footer()
        if means.is_late_on_some:
            return False
        if not means.has_finite_gradients or self._late_problem is not None:
            return False
        reducer = self._reducer
        reducer.buffers.adopt_scale(means)
        flags = [True] * len(means.slots) if reducer.buffers.zero_fill else means.presence
        self._check_later(means, is_applied=True)
        is_present = dict(zip(means.slot_of, flags, strict=True))
        if self._gradients is not None:
            self._updates.begin(self._inner, self._gradients, is_present)
        return True

    def _expose(self, why: str | None) -> None:
        """Make every ``p.grad`` the mean, but for those that the script has replaced or cleared."""
        if why is not None:
            self._warn_once(why)
        self._is_exposed = True
        if self._gradients is not None:
            self._gradients.resolve()

    def _before_use(self) -> None:
        """Before the script uses a gradient whose mean is under way."""
        if self._sums is not None and not self._is_exposed:
            self._is_exposed = True
            self._warn_once(_USED)

    def _step_with(self, closure: Callable[[], float]) -> float | None:
        self._warn_once("step() has a closure, which needs its gradients at once")
        self.complete()
        self._is_in_closure = True
        try:
            return self._inner.step(closure)
        finally:
            self._is_in_closure = False
            self.on_zero_grad()

    def _check_later(self, means: BucketSet | None, *, is_applied: bool) -> None:
        self._unchecked, self._is_applied = means, is_applied

    def _check_last(self) -> None:
        """Check whether the last sums were finite. *Collective*, if they were not."""
        means, self._unchecked = self._unchecked, None
        if means is None:
            return
        means.drain()
        self._reducer.means.record_nonfinite(means)
        problem = self._reducer.means.nonfinite.take()
        if self._is_applied:  # only its sum was not finite: the next step reports it
            self._late_problem = problem

    def _before_graph(self) -> None:
        """A second pass before step() adds to the mean of the first, which must be there then."""
        if self._sums is not None:
            self.await_gradients()

    def _exchange_ended(self) -> None:
        """Called at the end of every exchange, on all ranks."""
        if self._tuner is None:
            return
        plan = self._tuner.exchange_ended()
        if plan is None:
            return
        self._follow(plan, self._tuner.meter.readers)

    def _follow(self, plan: BucketOrder, readers: Mapping[nn.Parameter, set[nn.Module]]) -> None:
        """From now on, on all ranks; ``readers``: in which modules a parameter was read."""
        if self._tuner is not None:
            self._tuner.meter.close()
            self._tuner = None
        self.plan = plan
        self._reducer.buffers.set_order(plan.order, plan.num_early)
        self._readers = dict(readers)
        self._updates.install_hooks(
            self._models,
            *update_sites(self._models, self._names(), readers, self.eager_parameters),
            self._before_graph,
        )
        self._handles = [
            await_before_add(parameter) for parameter in self._reducer.buffers.sets[0].slot_of
        ]

    def _names(self) -> dict[nn.Parameter, str]:
        return {slot.parameter: slot.name for slot in self._reducer.buffers.sets[0].slots}

    def _module_names(self) -> dict[nn.Module, str]:
        """By the number of the model and the path in it."""
        return {
            module: f"{index}.{name}"
            for index, model in enumerate(self._models)
            for name, module in model.named_modules()
        }

    def _unhook(self) -> None:
        self._updates.unhook()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._tuner is not None:
            self._tuner.meter.close()
            self._tuner = None

    def _warn_once(self, why: str) -> None:
        """Warn once for each reason that nothing overlaps with the next forward."""
        if why in self.reasons or self._reducer.comm.size == 1:
            return
        self.reasons[why] = None
        warnings.warn(
            f"{self.name}: {why}, so this waits for the whole exchange and nothing of it overlaps "
            "with the next forward pass.",
            RuntimeWarning,
            stacklevel=4,
        )
