"""The training loop: pytorch-pfn-extras' manager, driven by an updater, on one or many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pytorch_pfn_extras.training.manager import ExtensionsManager
from pytorch_pfn_extras.training.trigger import TriggerLike, get_trigger  # type: ignore[attr-defined]
from pytorch_pfn_extras.writing import SimpleWriter, Writer  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import DataError, UsageError
from torchmn.comm import Communicator
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.comm.heartbeat import run_on_one_rank
from torchmn.data.batch_settings import BatchSettings, batch_settings_of
from torchmn.exchange.resharding import reshard_object, warnings_of
from torchmn.train.batch_source import Progress

if TYPE_CHECKING:
    from pytorch_pfn_extras.training.extension import ExtensionLike


class Trainer(ExtensionsManager):
    """Runs an updater until a trigger stops it, and extensions after each iteration.

    It is an ``ExtensionsManager`` whose epochs are those of the updater's iterator: ``epoch``,
    ``epoch_detail`` and all triggers are correct for epochs of different lengths. With ``comm``,
    rank 0 alone writes files; add extensions that print on rank 0 only, and collective ones (a
    multi-node evaluator, `LogReport`) on all ranks.

    Args:
        updater: does an iteration, such as `StandardUpdater`.
        stop_trigger: ``(n, "epoch")``, ``(n, "iteration")`` or a trigger; None trains forever.
        out: the folder for files, created by rank 0; None: extensions write no files.
        comm: the ranks that train together; None for one process.
        extensions: as given to `extend`.

    Example:
        >>> model = torchmn.train.Classifier(torch.nn.Linear(3, 2))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader([(torch.ones(3), 1)] * 8, batch_size=4)
        >>> updater = torchmn.StandardUpdater(loader, sgd, model)
        >>> trainer = torchmn.Trainer(updater, (2, "epoch"), out=None)
        >>> trainer.run()
        >>> trainer.epoch, trainer.iteration
        (2, 4)
    """

    def __init__(
        self,
        updater: Updater,
        stop_trigger: TriggerLike = None,
        out: str | Path | None = "result",
        *,
        comm: Communicator | None = None,
        extensions: Sequence[ExtensionLike] = (),
    ) -> None:
        self._updater = updater
        self._comm = comm
        is_writer = out is not None and (comm is None or comm.rank == 0)
        writer = SimpleWriter(out_dir=str(out)) if is_writer else _NoWriter(str(out))
        self._has_run = False
        self._elapsed_before_s = 0.0
        self._elapsed_at_end_s: float | None = None
        super().__init__(
            updater.model,
            updater.optimizer,
            1,
            iters_per_epoch=1,
            extensions=extensions,
            out_dir=str(out),
            writer=writer,
            state_objects={"updater": updater},
        )
        # After super().__init__, which copies its stop trigger, and with it a communicator.
        self._stop_trigger = get_trigger(stop_trigger)
        self._internal_stop_trigger = get_trigger(None)

    # ---- progress ----

    @property
    def updater(self) -> Updater:  # type: ignore[override]
        """The updater, which does an iteration."""
        return self._updater

    @property
    def iteration(self) -> int:
        """Iterations done, as the updater counts them."""
        self.start_extensions()
        return self._updater.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        """Ignored: the updater counts iterations."""

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._updater.epoch

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""
        return self._updater.epoch_detail

    @property
    def _iters_per_epoch(self) -> Any:
        """The length of an epoch, for the triggers of pytorch-pfn-extras, which divide by it."""
        before = self._updater.previous_epoch_detail or 0.0
        return _EpochLength(self._updater.iteration, before, self._updater.epoch_detail)

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, including those before a resumed snapshot.

        It is counted from the first iteration to the end of the last one.
        """
        if self._elapsed_at_end_s is not None:
            return self._elapsed_at_end_s
        return self._elapsed_before_s + super().elapsed_time

    # ---- training ----

    def needs_model_state(self, iteration: int | None = None) -> bool:
        """Return True: extensions that save a trainer need not declare that they use its models."""
        return True

    def run(self) -> None:
        """Train until the stop trigger fires. *Collective.*

        Extensions and updater are finalized in any case.

        Raises:
            UsageError: it has run before.
            RankMismatchError: ranks start at different iterations or have unequal epochs.
        """
        if self._has_run:
            raise UsageError("This trainer has run already. Make a new one to train again.")
        self._has_run = True
        try:
            self.start_extensions()
            self._raise_if_ranks_disagree()
            while not self.stop_trigger:
                with self.run_iteration():
                    self._updater.update()
            if self._start_time is not None:
                self._elapsed_at_end_s = self.elapsed_time
        finally:
            try:
                if self._start_extensions_called:
                    self.finalize()
            finally:  # an extension may raise: a checkpoint could not be written
                self._updater.finalize()

    def resume(self, snapshot: str | Path) -> None:
        """Resume from a snapshot that rank 0 reads and broadcasts. *Collective.*

        Call it after `extend`. All ranks load rank 0's state; with a `GlobalSampler`, samples are
        neither lost nor repeated.

        Raises DataError on all ranks: the file is missing or damaged.
        """

        def read(_: object = None) -> dict[str, Any]:
            try:
                state: dict[str, Any] = torch.load(snapshot, map_location="cpu", weights_only=True)
                return state
            except Exception as error:  # of zip, pickle or the file system
                text = f"{type(error).__name__}: {error}"
                raise DataError(f"The snapshot {snapshot} cannot be read: {text}") from error

        self.load_state_dict(read() if self._comm is None else run_on_one_rank(self._comm, 0, read))

    def state_dict(self) -> dict[str, Any]:
        """Models, optimizers, updater, extensions and the time spent."""
        elapsed_s = self.elapsed_time if self._start_time is not None else self._elapsed_before_s
        return {
            **super().state_dict(),
            "elapsed_time_s": elapsed_s,
            "stop_trigger": self._stop_trigger.state_dict(),
        }

    def replicated_tensors(self) -> list[Tensor]:
        """The tensors that the optimizers keep identical on all ranks. Local."""
        return [
            tensor
            for optimizer in self._optimizers.values()
            if hasattr(optimizer, "replicated_tensors")
            for tensor in optimizer.replicated_tensors()
        ]

    def load_state_dict(self, to_load: dict[str, Any]) -> None:
        """Restore a saved state. Local. Raises UsageError: an extension is not in it."""
        missing = [name for name in self._extensions if name not in to_load["extensions"]]
        if missing:
            raise UsageError(
                f"The state was saved without the extensions {', '.join(missing)}; it has "
                f"{', '.join(to_load['extensions'])}. Extend the trainer as when it was saved."
            )
        super().load_state_dict(to_load)
        self._elapsed_before_s = float(to_load.get("elapsed_time_s", 0.0))
        self._stop_trigger.load_state_dict(to_load.get("stop_trigger", {}))

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        Optimizers, the updater, extensions and triggers reshard their states if they can; the
        others get old rank 0's.
        """

        def resharded(group: str, targets: Mapping[str, object]) -> dict[str, Any]:
            found = {}
            for name, target in targets.items():
                if parts := [s[group][name] for s in states if name in s[group]]:
                    found[name] = reshard_object(target, parts, comm)
            return found

        stops = [state["stop_trigger"] for state in states]
        return {
            **states[0],
            "optimizers": resharded("optimizers", self._optimizers),
            "state_objects": resharded("state_objects", self._state_objects),
            "extensions": resharded(
                "extensions", {name: _Entry(e.extension) for name, e in self._extensions.items()}
            ),
            "stop_trigger": reshard_object(self._stop_trigger, stops, comm),
        }

    def resume_warnings(self) -> list[str]:
        """Warnings for loading a state of another number of ranks."""
        parts = [*self._optimizers.values(), *self._state_objects.values()]
        return [note for part in parts for note in warnings_of(part)]

    def batch_settings(self) -> BatchSettings | None:
        """The global batch that a checkpoint records: the first that a saved object knows."""
        known = (batch_settings_of(part) for part in self._state_objects.values())
        return next((settings for settings in known if settings is not None), None)

    def _raise_if_ranks_disagree(self) -> None:
        if self._comm is None:
            return
        length = self._updater.iterations_per_epoch
        mine = {
            "iteration": self.iteration,
            "epoch": float(f"{self.epoch_detail:.6g}"),
            "iterations per epoch": None if length is None else float(f"{float(length):.6g}"),
        }
        raise_if_values_differ(
            f"{self._comm.rank_label}: the ranks begin to train",
            self._comm.allgather_obj(mine),
            "Their triggers would not fire together. Use GlobalSampler, or scatter_dataset with "
            "force_equal_length=True, and resume all ranks from the same state.",
        )


class _NoWriter(Writer):
    """The writer of all ranks but rank 0: it writes nothing."""

    def initialize(self, out_dir: str) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Updater(Progress, Protocol):
    """Does the iterations of training. Called by `Trainer` in the same way on every rank."""

    model: nn.Module
    """The model, which the trainer saves; its reports are observed as ``main/...``."""

    @property
    def optimizer(self) -> Optimizer | dict[str, Optimizer]:
        """The optimizer, or several by name, which the trainer saves."""

    @property
    def iteration(self) -> int:
        """Iterations done."""

    @property
    def iterations_per_epoch(self) -> Fraction | None:
        """The mean number of iterations in an epoch; None if it is not known."""

    def update(self) -> None:
        """Do one iteration."""

    def finalize(self) -> None:
        """Release the updater's resources; also called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """The progress of the updater; model and optimizer are saved by the trainer."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


# Triggers of pytorch-pfn-extras count an epoch as a fixed number of iterations, and ask its manager
# for it: they fire where ``iteration % (length * period) < 1`` or ``int(length * point) ==
# iteration``. With an iterator that wraps, epochs take 79, 78, 78, 78 iterations, and no number is
# the length of all. So their manager gives them one that answers for the last iteration: they fire
# in the iteration in which the updater passes a point, as Chainer's did.

_ROUNDING = 1e-9  # epochs; 3 x 0.1 is not 0.3, and no data set has that many batches


@dataclass(frozen=True)
class _EpochLength:
    """The length of an epoch: where the last iteration began and ended, in epochs."""

    iteration: int
    before: float
    now: float

    def __mul__(self, epochs: float) -> _Epochs:
        return _Epochs(self, epochs)

    __rmul__ = __mul__


@dataclass(frozen=True)
class _Epochs:
    """A number of epochs, in place of a number of iterations in the arithmetic of triggers."""

    length: _EpochLength
    epochs: float

    def __rmod__(self, iteration: int) -> int:
        """0 if the last iteration has passed a multiple of the epochs, else 1."""
        ends = (self.length.before, self.length.now)
        before, now = (math.floor(end / self.epochs + _ROUNDING) for end in ends)
        return int(before == now)

    def __int__(self) -> int:
        """The last iteration if it has passed this point, else -1."""
        ends = self.length
        is_passed = ends.before + _ROUNDING < self.epochs <= ends.now + _ROUNDING
        return ends.iteration if is_passed else -1


class _Entry:
    """An extension as the manager saves it, beside the state of its trigger."""

    def __init__(self, extension: object) -> None:
        self._extension = extension

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        parts = [state["extension"] for state in states]
        return {**states[0], "extension": reshard_object(self._extension, parts, comm)}
