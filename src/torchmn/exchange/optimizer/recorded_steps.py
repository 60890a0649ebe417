"""Events about the steps of a multi-node optimizer, and about its models, for observers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchmn.base import events
from torchmn.base.torch_private import current_graph_task_id, is_tracing
from torchmn.comm.codecs.layout import is_small
from torchmn.data.batch_size import num_samples
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.parameter_hook import watch_gradient
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules.base import Schedule
from torchmn.exchange.sharded_parameters import whole_of

_GRADIENT_STEPS = frozenset({3, 10, 30, 100})
_GRADIENT_PERIOD = 500


class RecordedSteps:
    """Tells observers, if there are any, about the steps of one optimizer. Local."""

    def __init__(
        self,
        inner: Optimizer,
        reducer: GradientReducer,
        schedule: Schedule,
        models: Sequence[nn.Module],
    ) -> None:
        self._inner, self._reducer, self._schedule = inner, reducer, schedule
        self._models = models
        self._observers: tuple[events.Observer, ...] = ()  # observers that know the settings
        self._hooks = ModelHooks()
        self._facts: dict[Tensor, events.Gradient] = {}  # gradients that are timed in this step
        self._watches: list[RemovableHandle] = []
        self._noted: tuple[object, ...] = ()

    @contextmanager
    def step(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of one step."""
        self.meet()
        number, ended = self._reducer.step, None
        for observer in events.observers:
            observer.step_begins(optimizer)
        try:
            yield
            ended = number
            self._note_settings()
        finally:
            for observer in events.observers:
                observer.step_ended(optimizer, ended)
        self._watch_gradients(number + 1)

    def meet(self) -> None:
        """Watch the model if there are observers now, and tell new observers the settings."""
        if events.observers is self._observers:
            return
        self._take_off()
        self._observers = events.observers
        if self._observers:
            emit_forward(self._models, self._hooks)
            self._note_settings()
            self._watch_gradients(self._reducer.step)

    def step_without_data(self, optimizer: Optimizer) -> None:
        """Report a step of the other ranks in which this rank took part without data."""
        for observer in events.observers:
            observer.step_ended(optimizer, self._reducer.step, samples=0)

    def close(self, optimizer: Optimizer) -> None:
        """Report that the optimizer is closed, and remove all hooks."""
        for observer in events.observers:
            observer.optimizer_closed(optimizer)
        self._take_off()

    def _take_off(self) -> None:
        self._stop_watching()
        self._hooks.remove()
        self._noted = ()

    def _note_settings(self) -> None:
        reducer, schedule = self._reducer, self._schedule
        exchange, route = reducer.exchange, reducer.comm.route
        plan = schedule.name, reducer.codec, exchange.bucket_bytes
        if self._noted == plan:
            return
        self._noted = plan
        parameters = [parameter for _, parameter in exchange.trained()]
        filling = exchange.filling
        values = {
            "schedule": schedule.name,
            "codec": "float32" if reducer.codec is None else reducer.codec.name,
            "bucket_bytes": str(exchange.bucket_bytes or route.bucket_bytes),
            "num_buckets": str(len(filling.buckets)),
            "optimizer": type(self._inner).__name__,
            "model": ", ".join(type(model).__name__ for model in self._models),
            "num_parameters": str(sum(parameter.numel() for parameter in parameters)),
            "gradient_nbytes": str(sum(parameter.nbytes for parameter in parameters)),
        }
        for observer in events.observers:
            observer.settings(reducer.step, values)

    # ---- in some steps, when each gradient is ready; in others, only that backward has begun ----

    def _watch_gradients(self, number: int) -> None:
        is_timed = number in _GRADIENT_STEPS or (number > 0 and number % _GRADIENT_PERIOD == 0)
        if self._watches and not is_timed and not self._facts:
            return
        self._stop_watching()
        exchange = self._reducer.exchange
        trained = [p for _, p in exchange.trained() if p.requires_grad]
        if is_timed:
            self._facts = {
                whole_of(p): events.Gradient(p.numel(), p.nbytes, is_small(p.shape))
                for p in trained
            }
        watched = trained if is_timed else trained[-1:]
        self._watches = [watch_gradient(parameter, self._gradient_ready) for parameter in watched]

    def _gradient_ready(self, parameter: Tensor) -> None:
        facts = self._facts.get(parameter)
        for observer in events.observers:
            if facts is None:
                observer.phase("backward", begins=True)
            else:
                observer.gradient(facts)

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches, self._facts = [], {}


def emit_forward(models: Sequence[nn.Module], hooks: ModelHooks) -> None:
    """Tell observers when a model is called, until the hooks are removed. Local."""
    for model in models:
        hooks.before_forward(model, _forward_begins)


def _forward_begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or is_tracing() or current_graph_task_id() != -1:
        return  # a call that is traced, or run again by activation checkpointing in backward
    found = num_samples((*args, *kwargs.values())) if events.observers else None
    for observer in events.observers:
        observer.forward(found, is_training=torch.is_grad_enabled())
