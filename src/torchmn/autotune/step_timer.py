"""A stopwatch for training steps: how long they take, and when gradients are ready."""

from __future__ import annotations

import statistics
import time

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchmn.autotune.predict import ReadyGradient, StepFacts
from torchmn.compression.layout import is_small
from torchmn.gradients.buckets import NamedParameter
from torchmn.gradients.parameter_hook import watch_gradient


class StepTimer:
    """Counts and times the steps of one rank. Local.

    Between `watch` and `facts` hooks note the moment of every gradient; else it costs two readings
    of the time per step.
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
        """Backward is over, the exchange of what was left took so long."""
        self._waited_s += waited_s
        if self._began is not None:
            self._backward_s.append(time.perf_counter() - waited_s - self._began)
            self._began = None

    def step_ended(self) -> None:
        """One step is over, the next begins."""
        now = time.perf_counter()
        self.steps_s.append(now - self._since)
        self._waits_s.append(self._waited_s)
        self._since, self._waited_s = now, 0.0

    def restart(self) -> None:
        """Forget the steps so far. What was done since the last one is nobody's."""
        self.steps_s, self._waits_s, self._waited_s = [], [], 0.0
        self._since = time.perf_counter()

    def median_s(self, last: int) -> float:
        """The median of so many steps, the last ones."""
        return statistics.median(self.steps_s[-last:])

    def watch(self, parameters: list[NamedParameter]) -> None:
        """Note from now on when gradients are ready."""
        self._hooks = [
            watch_gradient(parameter, self._note)
            for _, parameter in parameters
            if parameter.requires_grad
        ]

    def facts(self, last: int) -> StepFacts:
        """What was noted, of so many steps; the hooks go."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        waited_s = statistics.median(self._waits_s[-last:])
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
            compute_s=max(1e-9, self.median_s(last) - waited_s),
            backward_s=statistics.median(self._backward_s) if self._backward_s else 0.0,
            gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)),
        )

    def _note(self, parameter: Tensor) -> None:
        """The first gradient is taken for the beginning of backward: none leaves before it."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        self._ready[parameter] = now - self._began
