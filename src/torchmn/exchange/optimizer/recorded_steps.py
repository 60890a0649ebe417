"""What a multi-node optimizer tells the record of the run, where one is kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchmn.comm.codecs.layout import is_small
from torchmn.data.batch_size import num_samples
from torchmn.exchange.model_hooks import ModelHooks
from torchmn.exchange.parameter_hook import watch_gradient
from torchmn.exchange.sharded_parameters import whole_of
from torchmn.record import recording
from torchmn.record.records import Phase
from torchmn.record.step_recorder import GradientFacts, StepRecorder

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer


class RecordedSteps:
    """A context around each step of one optimizer. Local; it does nothing without a record."""

    def __init__(self, optimizer: MultiNodeOptimizer, models: Sequence[nn.Module]) -> None:
        self._found = weakref.ref(optimizer)  # it has this: no cycle, it is freed when closed
        self._models = models
        self._recorder: StepRecorder | None = None
        self._before: Phase | None = None
        self._number = 0
        self._hooks = ModelHooks()
        self._facts: dict[Tensor, GradientFacts] = {}
        self._watches: list[RemovableHandle] = []
        self._noted: tuple[object, object] = (None, None)

    @property
    def _optimizer(self) -> MultiNodeOptimizer:
        optimizer = self._found()
        assert optimizer is not None  # noqa: S101 - it has this object
        return optimizer

    def __enter__(self) -> None:
        recorder = recording.current()
        if recorder is not self._recorder:
            self._meet(recorder)
        if recorder is not None:
            self._number = self._optimizer.reducer.step
            self._before = recorder.enter("optimizer")

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        recorder.leave(None if self._before is None else "other")
        if kind is None:
            self._note_settings(recorder)
            if recorder.optimizer_stepped(self._optimizer, self._number):
                self._watch_gradients(recorder)

    def meet(self) -> None:
        """Look at the model from now on, if there is a record."""
        self._meet(recording.current())

    def step_without_data(self) -> None:
        """A step of the other ranks, in which this rank has taken part."""
        if self._recorder is not None:
            self._recorder.end_step(self._optimizer.reducer.step, samples=0)

    def close(self) -> None:
        """Take the hooks off."""
        if self._recorder is not None:
            self._recorder.optimizer_closed(self._optimizer)
        self._meet(None)

    def _meet(self, recorder: StepRecorder | None) -> None:
        self._stop_watching()
        self._hooks.remove()
        self._recorder, self._noted = recorder, (None, None)
        if recorder is not None:
            for model in self._models:
                self._hooks.before_forward(model, self._forward_begins)
            self._note_settings(recorder)

    def _forward_begins(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        recorder = self._recorder
        if recorder is None or torch._C._current_graph_task_id() != -1:  # run again in backward
            return
        found = num_samples((*args, *kwargs.values()))
        recorder.forward_begins(found, is_training=torch.is_grad_enabled())

    def _note_settings(self, recorder: StepRecorder) -> None:
        optimizer = self._optimizer
        reducer, schedule = optimizer.reducer, optimizer.schedule
        if self._noted == (schedule, reducer.codec):
            return
        self._noted = schedule, reducer.codec
        exchange, route = reducer.exchange, reducer.comm.route
        filling = exchange.filling
        parameters = [parameter for _, parameter in reducer.parameters.trained()]
        recorder.settings_are(
            reducer.step,
            {
                "schedule": schedule.name,
                "codec": "float32" if reducer.codec is None else reducer.codec.name,
                "bucket_bytes": str(exchange.bucket_bytes or route.bucket_bytes),
                "num_buckets": str(len(filling.buckets)),
                "optimizer": type(optimizer.inner).__name__,
                "model": ", ".join(type(model).__name__ for model in self._models),
                "num_parameters": str(sum(parameter.numel() for parameter in parameters)),
                "gradient_nbytes": str(sum(parameter.nbytes for parameter in parameters)),
            },
        )

    # ---- when gradients are ready, in some steps ----

    def _watch_gradients(self, recorder: StepRecorder) -> None:
        self._stop_watching()
        if not recorder.wants_gradients():
            return
        trained = [p for _, p in self._optimizer.reducer.parameters.trained() if p.requires_grad]
        self._facts = {
            whole_of(p): GradientFacts(p.numel(), p.nbytes, is_small(p.shape)) for p in trained
        }
        self._watches = [watch_gradient(parameter, self._gradient_ready) for parameter in trained]

    def _gradient_ready(self, parameter: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.gradient_ready(self._facts[parameter])

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []
