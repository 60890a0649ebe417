"""Check every N steps that all ranks hold the same model, and report diverged replicas.

Data parallel training promises the same parameters on all ranks. A rank that breaks the promise
(a parameter changed by hand, a kernel that rounds differently, faulty memory) breaks it silently:
its loss looks fine, and the mean of gradients is of different models from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from torchmn.base.errors import (
    RankMismatchError,
    ResultWarning,
    raise_if_no_count,
    raise_if_unknown,
)
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.comm.checksums import Difference, checksum, describe_differences, differences
from torchmn.comm.local_tensors import reshard

if TYPE_CHECKING:
    from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """The results of replica checks: their number, differences, and nonfinite gradients.

    Example:
        >>> print(ReplicaReport(num_checks=3, last_step=300))
        replicas were equal in 3 checks up to step 300
    """

    num_checks: int
    last_step: int | None
    differences: tuple[tuple[int, Difference], ...] = ()
    """Pairs of the step and a difference that was found after it."""
    nonfinite: tuple[str, ...] = field(default=())
    """Descriptions of the steps whose gradients were not finite: step, ranks and parameters."""

    def __str__(self) -> str:
        if self.differences:
            found = [f"after step {step}: {what}" for step, what in self.differences]
            text = f"replicas differ {'; '.join(found)}"
        elif self.num_checks:
            text = f"replicas were equal in {self.num_checks} checks up to step {self.last_step}"
        else:
            text = "replicas were not compared yet"
        return ". ".join([text, *self.nonfinite])


class ReplicaCheck:
    """Compares the parameters of all ranks every N steps. *Collective*: all ranks, every step.

    ```python
    check = torchmn.ReplicaCheck(comm, model, every=100, optimizer=optimizer)
    for step in range(num_steps):
        ...
        check.step_ended()
    ```
    or ``trainer.extend(check, trigger=(1, "iteration"))``. A checkpointer does the same at every
    checkpoint. A check costs a checksum of the parameters (6 GB/s on a core) and one small message.

    Args:
        comm: the ranks that train.
        model: the module whose parameters are compared. Buffers are not: each rank has its own.
        every: number of steps between two checks.
        optimizer: a multi-node optimizer. Nothing is compared while its schedule lets replicas
            differ, and the report includes its record of nonfinite gradients.
        on_difference: ``raise``, or ``warn`` on rank 0 at each check.

    Raises UsageError: ``every`` is not a positive number; UnknownNameError: ``on_difference`` is
    neither of the two.

    Example:
        >>> check = torchmn.ReplicaCheck(comm, torch.nn.Linear(3, 1), every=1)
        >>> check.step_ended()
        >>> print(check.report())
        replicas were equal in 1 checks up to step 1
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        *,
        every: int = 100,
        optimizer: MultiNodeOptimizer | None = None,
        on_difference: Literal["raise", "warn"] = "raise",
    ) -> None:
        raise_if_no_count("every", every, "a number of steps")
        raise_if_unknown("on_difference", on_difference, ("raise", "warn"))
        self._comm = comm
        self._model = model
        self._every = every
        self._optimizer = optimizer
        self._on_difference = on_difference
        self._num_steps = 0
        self._num_checks = 0
        self._last_step: int | None = None
        self._found: list[tuple[int, Difference]] = []

    def step_ended(self) -> None:
        """Count a step, and compare if it is time. *Collective.*

        Raises RankMismatchError on all ranks, with parameters, ranks and the step.
        """
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self.check(self._num_steps)

    def __call__(self, trainer: Any) -> None:
        """Check as an extension of a trainer, called after every iteration. *Collective.*"""
        self._num_steps = trainer.iteration
        if self._num_steps % self._every == 0:
            self.check(self._num_steps)

    def check(self, step: int) -> list[Difference]:
        """Compare now, and return the differences. *Collective.* Raises as `step_ended`."""
        all_sums = self._comm.allgather_obj(self._checksums())
        # A rank may hold other parameters: a part of the model, or adapters of its own.
        common = set(all_sums[0]).intersection(*all_sums[1:])
        found = differences([{n: sums[n] for n in sums if n in common} for sums in all_sums])
        self._num_checks += bool(common)
        self._last_step = step
        self._found += [(step, difference) for difference in found]
        if found:
            text = f"{self._comm.rank_label}: {describe_differences(found, step)}"
            if self._nonfinite():
                text += f" Gradients were not finite before: {'; '.join(self._nonfinite())}."
            if self._on_difference == "raise":
                raise RankMismatchError(text)
            if self._comm.rank == 0:
                warn(text, ResultWarning)
        return found

    def report(self) -> ReplicaReport:
        """The results of all checks so far. Local; the same on all ranks."""
        return ReplicaReport(
            num_checks=self._num_checks,
            last_step=self._last_step,
            differences=tuple(self._found),
            nonfinite=self._nonfinite(),
        )

    def _checksums(self) -> dict[str, int]:
        reshard([self._model])
        named = dict(self._model.named_parameters())
        if self._optimizer is not None:
            # Only what the schedule keeps equal now: within a block ranks differ by design.
            promised = {id(tensor) for tensor in self._optimizer.replicated_tensors()}
            named = {name: p for name, p in named.items() if id(p) in promised}
        return {name: checksum([parameter]) for name, parameter in named.items()}

    def _nonfinite(self) -> tuple[str, ...]:
        if self._optimizer is None:
            return ()
        return tuple(str(problem) for problem in self._optimizer.nonfinite)
