"""A timer for training steps: how long they take, and when gradients are ready."""

from __future__ import annotations

import statistics
import time

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchmn.comm.codecs.layout import is_small
from torchmn.exchange.auto.predict import ReadyGradient, StepFacts
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.parameter_hook import watch_gradient


class StepTimer:
    """Counts and times the steps of one rank. Local.

    Between `record_gradients` and `facts` hooks record when each gradient is ready; otherwise it
    reads the clock twice per step.
    """

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._waits_s: list[float] = []
        self._since = time.perf_counter()
        self._waited_s = 0.0
        self._hooks: list[RemovableHandle] = []
        self._ready: dict[Tensor, float] = {}
        self._began: float | None = None
        self._backward_s: list[float] = []

    def backward_ended(self, waited_s: float) -> None:
        """The backward pass is over, and the exchange of its remaining gradients took this long."""
        self._waited_s += waited_s
        if self._began is not None:
            self._backward_s.append(time.perf_counter() - waited_s - self._began)
            self._began = None

    def step_ended(self) -> None:
        """A step is over, and the next one begins."""
        now = time.perf_counter()
        self.steps_s.append(now - self._since)
        self._waits_s.append(self._waited_s)
        self._since, self._waited_s = now, 0.0

    def restart(self) -> None:
        """Discard the steps so far. The time since the last one is not counted."""
        self.steps_s, self._waits_s, self._waited_s = [], [], 0.0
        self._since = time.perf_counter()

    def median_s(self, num_steps: int) -> float:
        """The median of the last ``num_steps`` steps."""
        return statistics.median(self.steps_s[-num_steps:])

    def record_gradients(self, parameters: list[NamedParameter]) -> None:
        """Record from now on when gradients are ready."""
        self._hooks = [
            watch_gradient(parameter, self._record)
            for _, parameter in parameters
            if parameter.requires_grad
        ]

    def facts(self, num_steps: int) -> StepFacts:
        """The medians of the last ``num_steps`` steps. Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        waited_s = statistics.median(self._waits_s[-num_steps:])
        gradients = [
            ReadyGradient(
                ready_s=ready_s,
                numel=parameter.numel(),
                nbytes=parameter.nbytes,
                is_small=is_small(parameter.shape),
            )
            for parameter, ready_s in self._ready.items()
        ]
        self._ready = {}
        return StepFacts(
            compute_s=max(1e-9, self.median_s(num_steps) - waited_s),
            backward_s=statistics.median(self._backward_s) if self._backward_s else 0.0,
            gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        )

    def _record(self, parameter: Tensor) -> None:
        """The first gradient counts as the start of the backward pass: none is sent before it."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        self._ready[parameter] = now - self._began
