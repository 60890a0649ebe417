"""The optimizer that users see: theirs, with gradients that are means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.communicators import Communicator
from torchmn.communicators.wire import Wire
from torchmn.errors import UnsupportedError, UsageError
from torchmn.exchange.base import Schedule
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.gradients import GradientExchange
from torchmn.exchange.replicas import broadcast_and_prove, raise_if_models_differ

Weight = Literal["rank", "samples"]


class MultiNodeOptimizer(Optimizer):
    """Made by `create_multi_node_optimizer`. It is a `torch.optim.Optimizer`.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects. When
    ``backward()`` returns, every ``p.grad`` holds the mean over ranks (under double buffering the
    mean of the step before).
    """

    _step_supports_amp_scaling = False

    def __init__(
        self,
        inner: Optimizer,
        comm: Communicator,
        models: Sequence[nn.Module],
        schedule: Schedule,
        wire: Wire,
        *,
        zero_fill: bool,
        weight: Weight,
    ) -> None:
        # Optimizer.__init__ would make groups and state of its own; ours are the inner one's.
        self.inner = inner
        self.communicator = comm
        self.schedule = schedule
        self._models = list(models)
        self._weight_kind = weight
        self._num_exchanges = 0
        named_parameters(inner, self._models)  # refuses what is not in the model
        raise_if_models_differ(comm, self._models)
        broadcast_and_prove(comm, self._models)
        self.exchange = GradientExchange(
            comm,
            wire,
            lambda: named_parameters(inner, self._models),
            zero_fill=zero_fill,
            num_sets=schedule.num_sets,
            on_backward_end=self._backward_ended,
        )
        schedule.attach(self.exchange, inner)
        self._reset_weight()
        if weight == "samples":
            self._models[0].register_forward_pre_hook(self._count_samples, with_kwargs=True)

    # ---- what makes it an Optimizer ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's own."""
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

    def __repr__(self) -> str:
        return f"MultiNodeOptimizer({self.schedule.name}, {self.communicator!r}, {self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's. Local."""
        self.schedule.forget_backward()
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. *Collective*: every rank calls it equally often.

        A closure's loss is averaged over ranks, so that optimizers which look at it (LBFGS) decide
        alike everywhere. Raises what an exchange raises.
        """
        wrapped = None if closure is None else self._mean_loss(closure)
        result = self.schedule.step(wrapped)
        self.exchange.step += 1
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's; on every rank alike. Raises UsageError: not in the model."""
        self.inner.add_param_group(param_group)
        named_parameters(self.inner, self._models)
        self.exchange.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """The inner state, which a plain optimizer loads too, and under ``torchmn`` the exchange's."""
        state = self.inner.state_dict()
        state["torchmn"] = {"schedule": self.schedule.name, **self.schedule.state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own state or that of a plain optimizer. Raises UsageError: another schedule's."""
        ours = dict(state_dict.get("torchmn", {}))
        saved = ours.pop("schedule", self.schedule.name)
        if ours and saved != self.schedule.name:
            raise UsageError(
                f"This state was saved with schedule {saved!r} and holds a gradient that "
                f"{self.schedule.name!r} would lose. Call flush() before saving, or use {saved!r}."
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "torchmn"})
        self.schedule.load_state_dict(ours)

    # ---- what is ours ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward pass outside exchanges the sum. Local."""
        before, self.exchange.is_syncing = self.exchange.is_syncing, False
        try:
            yield
        finally:
            self.exchange.is_syncing = before

    def set_weight(self, weight: float) -> None:
        """The weight of this rank in the next mean: its number of samples or tokens. Local.

        The mean over ranks is sum(w_i g_i) / sum(w_i) with g_i the local mean. It holds for the next
        backward pass only. Raises UsageError: negative or not finite.
        """
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a non-negative finite number.")
        self.exchange.weight = float(weight)
        self._is_weight_set = True

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop that may end earlier on some ranks. *Collective.*

        A rank that has left its loop takes part in the others' exchanges with weight 0, so that
        means are over the ranks that still have data. When all have left, the ranks take over
        parameters, buffers and optimizer state of a rank that ran to the end.
        """
        yield
        exchange = self.exchange
        num_exchanges, exchange.is_active = self._num_exchanges, False
        try:
            while self.schedule.take_part():
                pass
        finally:
            exchange.is_active = True
        counts = self.communicator.allgather_obj(num_exchanges)
        source = counts.index(max(counts))
        if self.communicator.rank == source:
            self.schedule.flush()
        self._take_over(source)

    def flush(self) -> None:
        """Apply what was exchanged but not applied (double buffering). *Collective.*"""
        self.schedule.flush()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients in hand by their global norm; returns the norm before. Local."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- inside ----

    def _backward_ended(self) -> None:
        exchange = self.exchange
        self.schedule.backward_ended()
        if exchange.is_stale:  # unfrozen since the layout: exchange again, now with them
            if self.schedule.num_sets > 1:
                raise UnsupportedError(
                    "Parameters were frozen, unfrozen or added without add_param_group under "
                    f"{self.schedule.name}. Call flush() and make the optimizer anew after it."
                )
            exchange.rebuild()
            self.schedule.forget_backward()
            exchange.exchange_now()
            return
        self._num_exchanges += 1
        self._reset_weight()

    def _reset_weight(self) -> None:
        self._is_weight_set = False
        self.exchange.weight = 1.0 if self._weight_kind == "rank" else 0.0

    def _count_samples(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not (module.training and torch.is_grad_enabled()) or self._is_weight_set:
            return
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
        first = next(tensors, None)
        if first is not None:
            self.exchange.weight += first.shape[0]

    def _mean_loss(self, closure: Callable[[], float]) -> Callable[[], float]:
        def mean_of_closure() -> float:
            with torch.enable_grad():
                loss = closure()
            local = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
            return float(self.communicator.allreduce(local, "mean"))

        return mean_of_closure

    def _take_over(self, source: int) -> None:
        comm = self.communicator
        state = comm.bcast_obj(self.inner.state_dict() if comm.rank == source else None, source)
        tensors = [[*m.parameters(), *m.buffers()] for m in self._models]
        held = comm.bcast_obj(
            [t.detach() for ts in tensors for t in ts] if comm.rank == source else None, source
        )
        if comm.rank != source:
            with torch.no_grad():
                for tensor, value in zip((t for ts in tensors for t in ts), held, strict=True):
                    tensor.copy_(value)
            self.inner.load_state_dict(state)
            self.schedule.load_state_dict({})


def named_parameters(inner: Optimizer, models: Sequence[nn.Module]) -> list[NamedParameter]:
    """The optimizer's parameters with the model's names, in the model's order.

    Raises UsageError: one is not in the model; UnsupportedError: one is not initialised yet.
    """
    prefixes = [""] if len(models) == 1 else [f"{i}." for i in range(len(models))]
    names = {
        parameter: prefix + name
        for prefix, model in zip(prefixes, models, strict=True)
        for name, parameter in model.named_parameters()
    }
    wanted = set()
    for group_index, group in enumerate(inner.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                label = group.get("param_names", {position: f"number {position}"})[position]
                raise UsageError(
                    f"Parameter {label} of the optimizer's group {group_index}, shape "
                    f"{list(parameter.shape)}, is not in the model. Pass the model that owns it, or "
                    "a list of models."
                )
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UnsupportedError(
                    f"Parameter '{names[parameter]}' is not initialised yet. Run one forward pass "
                    "before create_multi_node_optimizer."
                )
            wanted.add(parameter)
    return [(name, parameter) for parameter, name in names.items() if parameter in wanted]
