"""The optimizer that users see: theirs, with gradients that are means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchmn.communicators import Communicator
from torchmn.communicators.wire import Wire
from torchmn.errors import TorchmnError, UnsupportedError, UsageError
from torchmn.exchange.base import Schedule
from torchmn.exchange.gradients import GradientExchange
from torchmn.exchange.replicas import (
    broadcast_and_prove,
    named_parameters,
    raise_if_ranks_differ,
)

Weight = Literal["rank", "samples"]


class MultiNodeOptimizer(Optimizer):
    """Made by `create_multi_node_optimizer`. It is a `torch.optim.Optimizer`.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects. When
    ``backward()`` returns, every ``p.grad`` holds the mean over ranks (under double buffering the
    mean of the step before).
    """

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
        self._is_joining = False
        self._forward_hook: RemovableHandle | None = None
        codec = getattr(wire, "codec", None)
        self._asked = {
            "schedule": schedule.name,
            "codec": codec.name if codec is not None else None,
            "zero_fill": zero_fill,
            "weight": weight,
        }
        self._unify()
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
            self._forward_hook = self._models[0].register_forward_pre_hook(
                self._count_samples, with_kwargs=True
            )

    # ---- what makes it an Optimizer ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
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
        return False

    def __repr__(self) -> str:
        return f"MultiNodeOptimizer({self.schedule.name}, {self.communicator!r}, {self.inner!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's. Local."""
        self.schedule.forget_backward()
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. *Collective*: every rank calls it equally often.

        A rank without a backward pass takes part with zeros. A closure's loss is averaged over
        ranks, so that optimizers which look at it (LBFGS) decide alike everywhere. Raises what an
        exchange raises.
        """
        self.exchange.raise_if_unfinished()
        result = self.schedule.step(None if closure is None else self._mean_loss(closure))
        self.exchange.step += 1
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's. *Collective*: rank 0's parameters and buffers are taken over.

        Raises UsageError: a parameter is not in the model. The group is then not added.
        """
        self.inner.add_param_group(param_group)
        try:
            self._unify()
        except TorchmnError:
            self.inner.param_groups.pop()
            raise
        self.exchange.rebuild()

    def state_dict(self) -> dict[str, Any]:
        """The inner state, which a plain optimizer loads too; under ``torchmn`` what is ours."""
        state = self.inner.state_dict()
        state["torchmn"] = {"schedule": self.schedule.name, **self.schedule.state_dict()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own state or a plain optimizer's. Raises UsageError: another schedule's."""
        ours = dict(state_dict.get("torchmn", {}))
        saved = ours.pop("schedule", self.schedule.name)
        if ours and saved != self.schedule.name:
            raise UsageError(
                f"This state was saved with schedule {saved!r} and holds a gradient that "
                f"{self.schedule.name!r} would lose. Call flush() before saving, or use {saved!r}."
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "torchmn"})
        self.schedule.load_state_dict(ours)
        self.exchange.forget_weights()

    # ---- what is ours ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here; the first backward pass outside exchanges the sum. Local."""
        before, self.exchange.is_syncing = self.exchange.is_syncing, False
        try:
            yield
        finally:
            self.exchange.is_syncing = before

    def set_weight(self, weight: float) -> None:
        """The weight of this rank in the next mean: its number of samples or tokens. Local.

        The mean over ranks is sum(w_i g_i) / sum(w_i) with g_i the local mean. It holds for the
        next backward pass only. Raises UsageError: negative or not finite.
        """
        if not 0 <= weight < float("inf"):
            raise UsageError(f"weight={weight} must be a non-negative finite number.")
        self.exchange.weight = float(weight)
        self._is_weight_set = True

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop that may end earlier on some ranks. *Collective.*

        A rank that has left its loop takes part in the others' exchanges with weight 0, so that
        means are over the ranks that still have data. When all have left, the ranks that ended
        early take over parameters, buffers and optimizer state of one that ran to the end; what
        lives outside the optimizer, as a learning rate scheduler, they bring up to date themselves.
        Inside, no other collective may be called, and no closure be given to `step`.
        """
        exchange = self.exchange
        num_before = self._num_exchanges
        self._is_joining = True
        try:
            yield
            exchange.is_active = False
            while self.schedule.take_part():
                pass
        finally:
            exchange.is_active, self._is_joining = True, False
        self._reset_weight()
        exchange.forget_weights()
        comm = self.communicator
        everybody = comm.allgather_obj((self._num_exchanges - num_before, exchange.step))
        last = max(num for num, _ in everybody)
        if self._num_exchanges - num_before == last:
            self.schedule.flush()
        if any(num < last for num, _ in everybody):
            self._take_over(next(r for r, (num, _) in enumerate(everybody) if num == last))
        exchange.step = max(step for _, step in everybody)

    def flush(self) -> None:
        """Apply what was exchanged but not applied (double buffering). *Collective.*"""
        self.schedule.flush()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients in hand by their global norm; returns the norm before. Local."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def close(self) -> None:
        """Leave the model alone, to train it by itself or make another optimizer for it. Local."""
        self.exchange.close()
        if self._forward_hook is not None:
            self._forward_hook.remove()

    # ---- inside ----

    def _unify(self) -> None:
        raise_if_ranks_differ(self.communicator, self._models, self.inner, self._asked)
        broadcast_and_prove(self.communicator, self._models)

    def _backward_ended(self) -> None:
        try:
            self.schedule.backward_ended()
        finally:
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
        if self._is_joining:
            raise UnsupportedError(
                "step(closure) inside join(): a rank that has left its loop cannot take part in "
                "the mean of the loss. Compute loss and gradients before step()."
            )

        def mean_of_closure() -> float:
            num_before = self._num_exchanges
            with torch.enable_grad():
                loss = closure()
            if self._num_exchanges == num_before:  # no backward pass on this rank
                self.exchange.exchange_now()
            local = torch.as_tensor(loss).detach()
            mean = self.communicator.allreduce(local.double().cpu().reshape(1), "mean")
            if isinstance(loss, Tensor):  # as `loss.item()` is what users write
                return cast(float, mean.to(local).reshape(local.shape))
            return float(mean)

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
