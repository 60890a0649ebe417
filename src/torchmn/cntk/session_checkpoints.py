"""The checkpoints of a training session, and how it continues from one."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from torchmn.checkpoint import create_multi_node_checkpointer
from torchmn.checkpoint.retention import is_checkpoint
from torchmn.cntk.session_config import CheckpointConfig
from torchmn.cntk.session_loop import SessionUpdater
from torchmn.comm import Communicator
from torchmn.errors import UsageError


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

        Returns whether there was one. Without ``preserve_all`` a folder with the name of a
        preserved one is of another session.
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
