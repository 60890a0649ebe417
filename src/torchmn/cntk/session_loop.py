"""The loop of a training session: its iterations, and the actions that run between them."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchmn.base import events
from torchmn.base.errors import UsageError
from torchmn.checkpoint import create_multi_node_checkpointer
from torchmn.checkpoint.manifest import is_checkpoint
from torchmn.cntk.session_config import CheckpointConfig, DataUnit, Frequency, checked_frequency
from torchmn.comm import Communicator

if TYPE_CHECKING:
    from torchmn.cntk.train.training_session import TrainingSession


class SessionUpdater:
    """An iteration of a session: a minibatch. The last iteration finds no data."""

    iterations_per_epoch = None

    def __init__(self, session: TrainingSession, device: torch.device | str | None) -> None:
        self.session = session
        self.trainer = session.trainer
        self.model = session.trainer.model
        self.optimizer = {f"learner{n}": each for n, each in enumerate(session.trainer.optimizers)}
        self.progress: Action | None = None
        self.validation: Action | None = None
        self.has_ended = False
        self.has_trained = False
        self._device = device
        self._is_stopped = False
        self.before = self.position()  # the position before the last iteration

    @property
    def iteration(self) -> int:
        """Minibatches so far."""
        return self.trainer.num_minibatches

    @property
    def epoch(self) -> int:
        """Sweeps so far."""
        return self.trainer.num_sweeps

    @property
    def epoch_detail(self) -> float:
        """Equal to `epoch`: a source does not tell the fraction of a sweep."""
        return float(self.epoch)

    @property
    def previous_epoch_detail(self) -> float | None:
        """`epoch_detail` before the last iteration."""
        return float(self.before[DataUnit.sweep])

    def position(self) -> dict[DataUnit, int]:
        """The progress of the training, in each unit."""
        return {
            DataUnit.sample: self.trainer.total_number_of_samples_seen,
            DataUnit.minibatch: self.trainer.num_minibatches,
            DataUnit.sweep: self.trainer.num_sweeps,
        }

    def stop(self) -> None:
        """Let the next iteration be the last one."""
        self._is_stopped = True

    def update(self) -> None:
        """Train on the next minibatch, or find that there is none. *Collective.*"""
        session = self.session
        self.before = self.position()
        num_samples = self.before[DataUnit.sample]
        size = int(session.sizes.value(num_samples, self.before[DataUnit.sweep]))
        size = limited(size, session.max_samples, num_samples)
        arguments = {}
        if size and not self._is_stopped:
            with events.during("data"):
                arguments = session.next_minibatch(session.mb_source, size)
        has_data = self.trainer.train_minibatch(arguments, device=self._device)
        self.has_ended = not has_data
        self.has_trained |= has_data

    def finalize(self) -> None:
        """Do nothing: no resources are held."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the source and the summaries that are due; the trainer saves the rest."""
        return {
            "source": self.session.mb_source.get_checkpoint_state(),
            "is_summarized": self.progress is not None and self.progress.is_due(),
            "is_validated": self.validation is not None and self.validation.is_due(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the source; skip the summaries that were written right after the checkpoint."""
        self.session.mb_source.restore_from_checkpoint(state["source"])
        for writer in self.trainer.progress_writers:
            if state["is_summarized"]:
                writer.skip_training_summary()
            if state["is_validated"]:
                writer.skip_test_summary()


class Action:
    """An action of a session, run when the training passes a multiple of a frequency."""

    def __init__(
        self,
        name: str,
        priority: int,
        frequency: Frequency,
        updater: SessionUpdater,
        run: Callable[[int], object],
    ) -> None:
        self.default_name = name
        self.priority = priority
        self.period, self.unit = checked_frequency(frequency)
        self.trigger: Any = lambda _: self.is_due()
        self._updater = updater
        self._run = run
        self._ran_at = -1

    def is_due(self) -> bool:
        """Whether a multiple was passed in this iteration; at the end, whether it is yet to run."""
        if self._updater.has_ended:
            return self._updater.has_trained and self._ran_at != self._updater.iteration
        now = self._updater.position()[self.unit]
        return self.period is not None and now // self.period != self.index

    @property
    def index(self) -> int:
        """Number of multiples that were passed before this iteration."""
        before = self._updater.before[self.unit]
        return 0 if self.period is None else before // self.period

    def __call__(self, loop: object) -> None:
        """Run the action; called by the loop when it is due."""
        self._ran_at = self._updater.iteration
        self._run(self.index)


def limited(size: int, max_samples: int | None, num_samples: int) -> int:
    """The size of the next minibatch, so that there are no samples beyond ``max_samples``."""
    return size if max_samples is None else max(0, min(size, max_samples - num_samples))


class SessionCheckpoints:
    """The checkpoints of a session: the newest ones in a folder, and those that are preserved."""

    def __init__(
        self, config: CheckpointConfig, updater: SessionUpdater, comm: Communicator
    ) -> None:
        assert config.filename is not None  # noqa: S101
        self.path = Path(config.filename).absolute()
        self.frequency = config.frequency
        self.comm = comm
        self._config = config
        self._updater = updater
        self.checkpointer = create_multi_node_checkpointer(
            comm, self.path.parent, self.path.name, on_failure="raise"
        )

    def save(self, index: int) -> None:
        """Save, and preserve it under this index where the configuration asks. *Collective.*"""
        external = {"session": self._updater.state_dict()}
        trainer = self._updater.trainer
        self.checkpointer.save(trainer.num_minibatches, trainer.stateful(external))
        if self._config.preserve_all:
            trainer.save_checkpoint(f"{self.path}{index}", external)

    def save_now(self) -> None:
        """Save and wait until it is written: the job is about to end. *Collective.*"""
        trainer = self._updater.trainer
        done = {"is_summarized": False, "is_validated": False}  # before: the writers know of it
        external = {"session": {**self._updater.state_dict(), **done}}
        self.checkpointer.save(trainer.num_minibatches, trainer.stateful(external))
        self.checkpointer.finish()

    def restore(self) -> bool:
        """Continue from the newest checkpoint, or else from the last one that was preserved.

        Returns whether there was one. Without ``preserve_all`` preserved checkpoints are not looked
        for: those in the folder belong to another session. Raises UsageError: the checkpoint was
        not saved by a session.
        """
        if not self._config.restore:
            return False
        external: dict[str, Any] = {}
        trainer = self._updater.trainer
        state = trainer.stateful(external)
        self.checkpointer.resume(state)
        where: Path | None = self.path
        if self.checkpointer.resumed_from is None:
            where = self._last_preserved() if self._config.preserve_all else None
            if where is None:
                return False
            external = trainer.restore_from_checkpoint(where)
        if "session" not in external:
            raise UsageError(
                f"{self.comm.rank_label}: the checkpoint in {where} was not saved by a session, so "
                "the position in the data is not known. Call trainer.restore_from_checkpoint() "
                "and pass CheckpointConfig(..., restore=False) with another filename to begin at "
                "the first sample."
            )
        self._updater.load_state_dict(external["session"])
        if self.comm.rank == 0:
            print(f"Restoring training session from the checkpoint '{where}'", flush=True)
        return True

    def _last_preserved(self) -> Path | None:
        """The folder with the highest index, as rank 0 sees it. *Collective.*"""
        found = []
        if self.comm.rank == 0:
            for step in self.path.parent.glob(f"{glob.escape(self.path.name)}*/step-*"):
                index = step.parent.name.removeprefix(self.path.name)
                if index.isdecimal() and is_checkpoint(step.name):
                    found.append((int(index), step.parent.name))
        name = self.comm.bcast_obj(max(found)[1] if found else "")
        return self.path.parent / name if name else None
