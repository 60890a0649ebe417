"""CNTK's ``cntk.train.training_session``: checkpoints, progress, cross validation and a test.

A session is a `torchmn.train.Trainer` whose iteration is a minibatch of the source, and whose
extensions are CNTK's actions. After each minibatch those that are due run in this order: the
checkpoint, the summary of the progress, cross validation. An action of frequency f is due when the
training has passed a multiple of f; once, even if it has passed several. At the end each runs once
more if something was trained since it ran, then the test.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchmn.base.errors import UsageError
from torchmn.base.warn import warn
from torchmn.cntk.readers import MinibatchData, MinibatchSource, as_minibatch_source
from torchmn.cntk.readers.deserializer import wanted_streams
from torchmn.cntk.readers.user import UserSourceMinibatches
from torchmn.cntk.schedules import minibatch_size_schedule
from torchmn.cntk.session_config import (
    CheckpointConfig,
    CrossValidationConfig,
    DataUnit,
    Frequency,
    Size,
    Source,
    TestConfig,
    checked_frequency,
    is_positive_int,
    raise_if_infinite,
)
from torchmn.cntk.session_loop import Action, SessionCheckpoints, SessionUpdater, limited
from torchmn.cntk.train.distributed import default_communicator
from torchmn.cntk.train.trainer import Trainer
from torchmn.comm import Communicator
from torchmn.run import Preemption
from torchmn.train.evaluation import sync_buffers_

__all__ = [
    "CheckpointConfig",
    "CrossValidationConfig",
    "DataUnit",
    "Evaluation",
    "TestConfig",
    "TrainingSession",
    "minibatch_size_schedule",
    "training_session",
]


@dataclass(frozen=True)
class Evaluation:
    """The result of a cross validation or test, over all ranks.

    >>> from torchmn.cntk.train.training_session import Evaluation
    >>> Evaluation(error=0.25, num_samples=8, num_minibatches=2).error
    0.25
    """

    error: float
    """The mean of the metric over all samples, or of the loss without a metric."""
    num_samples: int
    num_minibatches: int


class TrainingSession:
    """Trains to the end of a source. Made by `training_session`; `train` does the work.

    Subclass it and override `on_cross_validation_end` in place of a callback.

    >>> from torchmn import cntk
    >>> model = torch.nn.Linear(2, 2)  # whose forward has the parameter "input"
    >>> learner = cntk.sgd(model.parameters(), lr=0.1)
    >>> trainer = cntk.Trainer(model, cntk.cross_entropy_with_softmax, learner)
    >>> source = cntk.MinibatchSourceFromData(
    ...     {"x": np.ones((4, 2)), "y": np.array([0, 1, 1, 0])}, max_sweeps=1
    ... )
    >>> streams = {"input": source.streams.x, "labels": source.streams.y}
    >>> cntk.TrainingSession(trainer, source, 2, streams).train()
    >>> trainer.total_number_of_samples_seen
    4
    """

    def __init__(
        self,
        trainer: Trainer,
        mb_source: Source,
        mb_size: Size,
        model_inputs_to_streams: Mapping[Any, Any],
        max_samples: int | None = None,
        progress_frequency: Frequency = None,
        checkpoint_config: CheckpointConfig | None = None,
        cv_config: CrossValidationConfig | None = None,
        test_config: TestConfig | None = None,
    ) -> None:
        if max_samples is None:
            raise_if_infinite("training", mb_source, "max_samples=")
        elif not is_positive_int(max_samples):
            raise UsageError(
                f"max_samples={max_samples!r} must be a positive int: a number of samples."
            )
        self.trainer = trainer
        self.mb_source = as_minibatch_source(mb_source)
        self.max_samples = None if max_samples is None else int(max_samples)
        self.sizes = minibatch_size_schedule(mb_size)
        self.input_map = model_inputs_to_streams
        wanted_streams(self.input_map, self.mb_source.streams)
        self.progress_frequency = progress_frequency
        self.checkpoint_config = checkpoint_config
        self.cv_config = cv_config
        self.test_config = test_config
        self.comm = trainer.communicator
        """The ranks that train together; None if the learners are not distributed."""
        checked_frequency(progress_frequency)

    def train(self, device: torch.device | str | None = None) -> Evaluation | None:
        """Train, and test; returns the result of the test, if there is one. *Collective.*

        Minibatches are moved to ``device``, by default that of the model.

        Raises:
            UsageError: the checkpoint is of another kind of training, or several ranks train
                without a distributed learner.
            DataError: a checkpoint cannot be read or written.
            UnsupportedError: pytorch-pfn-extras, which has the loop, is not installed.
            SystemExit: status 85; the job is about to end and was saved: see `Preemption`.
        """
        from torchmn.train import Trainer as Loop  # needs the extra `trainer`, as no other part

        updater = SessionUpdater(self, device)
        loop = Loop(updater, lambda _: updater.has_ended, None, comm=self.comm)
        checkpoints = None
        if self.checkpoint_config is not None and self.checkpoint_config.filename is not None:
            checkpoints = SessionCheckpoints(self.checkpoint_config, updater, self._comm_of_job())
            loop.extend(Action("checkpoint", 3, checkpoints.frequency, updater, checkpoints.save))
            # It saves nothing here: it waits for what is being written when the loop ends.
            loop.extend(checkpoints.checkpointer, trigger=lambda _: False)
        updater.progress = Action("progress", 2, self.progress_frequency, updater, self._summarize)
        loop.extend(updater.progress)
        if self.cv_config is not None:

            def validate(index: int) -> None:
                if not self._cross_validate(index, device):
                    updater.stop()

            validation = Action("validation", 1, self.cv_config.frequency, updater, validate)
            loop.extend(validation)
            if self.cv_config.minibatch_source is not None:
                updater.validation = validation
        preemption = None
        was_restored = False
        if checkpoints is not None:
            was_restored = checkpoints.restore()
            preemption = Preemption(checkpoints.comm, checkpoints.save_now)
            loop.extend(preemption, name="preemption", trigger=(1, "iteration"), priority=-1)
        try:
            loop.run()
        finally:
            if preemption is not None:
                preemption.close()
        if not (updater.has_trained or was_restored):
            self._warn(
                "This session has trained nothing: its source was at the end of its data before, "
                f"or max_samples={self.max_samples} is not above the "
                f"{self.trainer.total_number_of_samples_seen} samples that the trainer has seen. "
                "Give another source, or max_samples of all sessions of this trainer together."
            )
        if self.test_config is None:
            return None
        return self._evaluate("test", self.test_config, None, device)

    def on_cross_validation_end(
        self, index: int, average_error: float, num_samples: int, num_minibatches: int
    ) -> bool | None:
        """Called on all ranks after each cross validation; False on any rank ends the training.

        Calls the callback of the configuration.
        """
        if self.cv_config is None or self.cv_config.callback is None:
            return True
        return self.cv_config.callback(index, average_error, num_samples, num_minibatches)

    # ---- actions ----

    def _summarize(self, index: int) -> None:
        self.trainer.summarize_training_progress()

    def _cross_validate(self, index: int, device: torch.device | str | None) -> bool:
        """Evaluate, and return whether all ranks continue training. *Collective.*"""
        config = self.cv_config
        assert config is not None  # noqa: S101
        result = Evaluation(0.0, 0, 0)
        if config.minibatch_source is not None:
            result = self._evaluate("cross validation", config, config.max_samples, device)
        continues = self.on_cross_validation_end(
            index, result.error, result.num_samples, result.num_minibatches
        )
        own = continues is not False
        return own if self.comm is None else all(self.comm.allgather_obj(own))

    def _evaluate(
        self,
        what: str,
        config: CrossValidationConfig | TestConfig,
        max_samples: int | None,
        device: torch.device | str | None,
    ) -> Evaluation:
        """Evaluate a source exactly over all ranks; sources keep their positions. *Collective.*"""
        assert config.minibatch_source is not None  # noqa: S101
        source = as_minibatch_source(config.minibatch_source)
        sizes = minibatch_size_schedule(config.minibatch_size)
        inputs = config.model_inputs_to_streams
        total, num_samples, num_minibatches = 0.0, 0, 0
        moved = [source] if isinstance(config, TestConfig) else [self.mb_source, source]
        with self._equal_buffers(), _unmoved(*moved):
            while max_samples is None or num_samples < max_samples:
                size = limited(int(sizes.value(num_samples, 0)), max_samples, num_samples)
                arguments = self.next_minibatch(source, size, inputs)
                added, count = self.trainer.evaluation_sums(
                    arguments, device, criterion=config.criterion
                )
                if count == 0:
                    break  # on all ranks
                total, num_samples = total + added, num_samples + count
                num_minibatches += 1
        self.trainer.summarize_test_progress()
        if not num_samples:
            self._warn(
                f"The {what} had no samples, and its error is NaN: its source was at the end of "
                "its data before. Give it a source of its own."
            )
            return Evaluation(float("nan"), 0, 0)
        return Evaluation(total / num_samples, num_samples, num_minibatches)

    def _warn(self, text: str) -> None:
        if self.comm is None or self.comm.rank == 0:
            warn(text)

    @contextmanager
    def _equal_buffers(self) -> Iterator[None]:
        """Average running statistics over ranks for the body, then restore each rank's own.

        *Collective.*
        """
        if self.comm is None:
            yield
            return
        buffers = list(self.trainer.model.buffers())
        own = [buffer.clone() for buffer in buffers]
        sync_buffers_([self.trainer.model], self.comm)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, own, strict=True):
                    buffer.copy_(value)

    def next_minibatch(
        self,
        source: MinibatchSource | UserSourceMinibatches,
        size: int,
        input_map: Mapping[Any, Any] | None = None,
    ) -> dict[Any, MinibatchData]:
        """This rank's part of the next minibatch of ``size`` samples over all ranks. Local."""
        input_map = self.input_map if input_map is None else input_map
        if self.comm is None:
            return source.next_minibatch(size, input_map)
        return source.next_minibatch(
            size, input_map, num_data_partitions=self.comm.size, partition_index=self.comm.rank
        )

    def _comm_of_job(self) -> Communicator:
        comm = self.comm or default_communicator()
        if self.comm is None and comm.size > 1:
            raise UsageError(
                f"{comm.rank_label}: {comm.size} ranks run this session, and its learners are not "
                "distributed: each rank would train alone and save in the same folder. Use "
                "data_parallel_distributed_learner or block_momentum_distributed_learner."
            )
        return comm


def training_session(
    trainer: Trainer,
    mb_source: Source,
    mb_size: Size,
    model_inputs_to_streams: Mapping[Any, Any],
    progress_frequency: Frequency = None,
    max_samples: int | None = None,
    checkpoint_config: CheckpointConfig | None = None,
    cv_config: CrossValidationConfig | None = None,
    test_config: TestConfig | None = None,
) -> TrainingSession:
    """A session that trains to the end of ``mb_source``, or up to ``max_samples``. Local.

    ```python
    training_session(
        trainer, train_source, 64, {"features": train_source.streams.features, ...},
        progress_frequency=50000,
        checkpoint_config=CheckpointConfig("models/cifar", frequency=50000),
        test_config=TestConfig(test_source, minibatch_size=64),
    ).train()
    ```

    Args:
        trainer: a `torchmn.cntk.Trainer`.
        mb_source: the data.
        mb_size: samples over all ranks in a minibatch, or a `minibatch_size_schedule`.
        model_inputs_to_streams: names of the trainer's arguments to streams of the source.
        progress_frequency: when summaries are written: samples, ``(n, unit)``, None for the end.
        max_samples: end after this number of samples over all ranks.
        checkpoint_config: where and when to save; without it nothing is saved.
        cv_config: what to evaluate during training.
        test_config: what to evaluate at the end.

    Raises UsageError: ``mb_source`` is infinite and ``max_samples`` is None; a frequency or size is
        no positive number; ``model_inputs_to_streams`` is no dict of the source's streams.

    >>> from torchmn import cntk
    >>> model = torch.nn.Linear(2, 2)
    >>> trainer = cntk.Trainer(
    ...     model, cntk.cross_entropy_with_softmax, cntk.sgd(model.parameters(), lr=0.1)
    ... )
    >>> source = cntk.MinibatchSourceFromData({"x": np.ones((4, 2), np.float32)}, max_sweeps=1)
    >>> session = cntk.training_session(trainer, source, 2, {"x": source.streams.x})
    """
    return TrainingSession(
        trainer,
        mb_source,
        mb_size,
        model_inputs_to_streams,
        max_samples,
        progress_frequency,
        checkpoint_config,
        cv_config,
        test_config,
    )


@contextmanager
def _unmoved(*sources: MinibatchSource | UserSourceMinibatches) -> Iterator[None]:
    """Set sources back to their positions after the body."""
    positions = [(source, source.get_checkpoint_state()) for source in sources]
    try:
        yield
    finally:
        for source, position in positions:
            source.restore_from_checkpoint(position)
