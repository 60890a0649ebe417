"""CNTK's ``cntk.train.trainer``: exact sums over the samples of all ranks at each minibatch.

The path of a minibatch: each rank computes the mean loss of its part; a sum of four numbers (loss,
metric, samples, end of a sweep) is started and runs while backward does; the multi-node optimizers
average gradients weighted by samples; then the total number of samples is known, from which the
learners take rate and momentum, and all ranks step. A rank whose part is empty takes part with
weight 0.

Under block momentum a rank steps with its own gradients and the number of its own samples, and
blocks end on all ranks at the same minibatch, where the samples of all have filled them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import DataError, UnsupportedError, UsageError
from torchmn.checkpoint import MultiNodeCheckpointer, create_multi_node_checkpointer
from torchmn.cntk.learner import Learner, LearnerSet
from torchmn.cntk.readers.minibatch import MinibatchData
from torchmn.cntk.train.distributed import default_communicator, optimizers_of, warn_if_equal
from torchmn.cntk.train.minibatch_sums import MinibatchSums, mean_and_sum, start_sum
from torchmn.data.batch_size import num_samples
from torchmn.exchange.optimizer import MultiNodeOptimizer
from torchmn.exchange.schedules.local_updates.base import LocalUpdateSchedule
from torchmn.nn.layer_communicator import has_collective_layers
from torchmn.train.evaluation import evaluation_mode

__all__ = ["Trainer"]


Criterion = Callable[..., Tensor]
# A stream of one rank's part of a minibatch.
Argument = Tensor | MinibatchData | np.ndarray[Any, Any] | Sequence[Any]


class Trainer:
    """Trains a model by minibatches, of which each rank has a part.

    Made and used on all ranks; with a distributed learner the constructor is *collective*.

    Args:
        model: any `nn.Module`, compiled or not.
        criterion: the loss, or (loss, metric): callables of the model's output and of the arguments
            that the model does not take. They return a value for each sample, ``(num_samples,)``,
            or a scalar that is the mean over this rank's samples. A loss that is a module is
            trained and saved as well.
        parameter_learners: one or more learners of `torchmn.cntk`, distributed or not, or any
            `torch.optim.Optimizer`, which gets mean gradients. No two have a parameter in common;
            a parameter that is in none is not changed. All are distributed with the same options,
            or none: each rank then trains by itself.
        progress_writers: one or more receivers of the progress, such as `ProgressPrinter`.

    Attributes:
        communicator: the communicator of the distributed learners; None without one.
        optimizers: the `torchmn.MultiNodeOptimizer` of all distributed learners, or the learners.

    Raises:
        UsageError: learners share a parameter, or not all are distributed in the same way.
        RankMismatchError: the ranks' models differ.

    Example:
        >>> import torch, torchmn.cntk as C
        >>> model = torch.nn.Linear(2, 3)  # whose forward has the parameter "input"
        >>> learner = C.sgd(model.parameters(), C.learning_rate_schedule(0.01, C.UnitType.sample))
        >>> trainer = C.Trainer(
        ...     model, (C.cross_entropy_with_softmax, C.classification_error), learner
        ... )
        >>> labels = torch.tensor([0, 2, 1, 1])
        >>> trainer.train_minibatch({"input": torch.randn(4, 2), "labels": labels})
        True
        >>> trainer.total_number_of_samples_seen
        4
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | Sequence[Criterion | None],
        parameter_learners: Any,
        progress_writers: Any = None,
    ) -> None:
        self.model = model
        self._criterion = _criteria(criterion)
        self.parameter_learners = _as_list(parameter_learners)
        self.progress_writers = _as_list(progress_writers)
        self.total_number_of_samples_seen = 0
        """Samples over all ranks so far."""
        self.num_minibatches = 0
        """Number of minibatches so far that had samples on any rank."""
        self.num_sweeps = 0
        """Number of sweeps over the data that have ended."""
        self._last = MinibatchSums()
        self._has_begun = False
        parts = [part for part in (model, self._criterion[0]) if isinstance(part, nn.Module)]
        self._models = [part for part in parts if any(True for _ in part.parameters())]
        self.communicator, self.optimizers = optimizers_of(self.parameter_learners, self._models)
        first = self.optimizers[0]
        # The one of all distributed learners; None where each rank trains by itself.
        self._shared = first if isinstance(first, MultiNodeOptimizer) else None
        self._model_names = _parameter_names(model)
        self._checkpointer: tuple[Path, MultiNodeCheckpointer] | None = None

    # ---- training ----

    def train_minibatch(
        self,
        arguments: Mapping[str, Argument],
        outputs: None = None,
        device: torch.device | str | None = None,
        is_sweep_end: bool | None = None,
    ) -> bool:
        """Update the parameters by one minibatch; False if no rank has data. *Collective.*

        After False nothing has changed, except that the last block of block momentum has ended, so
        that all ranks hold the same parameters.

        Args:
            arguments: this rank's part of the minibatch, by name: `MinibatchData`, a tensor or an
                array, of which the first size is that of the samples. Those whose names are
                parameters of ``model.forward`` go to the model, the others to loss and metric, in
                this order. Sequences are passed as `MinibatchData`, single samples as a tensor. An
                empty part is ``{}`` or has no samples; with layers whose ranks communicate, such as
                `torchmn.nn.MultiNodeBatchNorm2d`, it is tensors of no samples, and ``{}`` is
                for the end of the data on all ranks.
            outputs: not supported; let the model keep what you want to see.
            device: where arguments are moved; default: the device of the model's first parameter.
            is_sweep_end: whether a sweep over the data ends here; default: as `MinibatchData` says.

        Raises:
            UsageError: names that fit neither the model nor the criterion; a loss or metric of
                another shape.
            NonFiniteGradientError: a gradient is not finite.
        """
        if outputs is not None:
            raise UnsupportedError(
                "train_minibatch(outputs=...) is not supported: a model of torch has no variables "
                "by name. Let a module keep its output, or give it a forward hook."
            )
        with self._frozen_others():
            return self._train(arguments, device, is_sweep_end)

    def _train(
        self,
        arguments: Mapping[str, Argument],
        device: torch.device | str | None,
        is_sweep_end: bool | None,
    ) -> bool:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss, own = self._evaluate(arguments, device, self._criterion)
        if self._shared is not None and not self._has_begun:
            # Once: later minibatches have come from the same source, in the same way.
            warn_if_equal(list(map(_values, arguments.values())), self._shared.communicator)
        self._has_begun = True
        own.is_sweep_end = _is_sweep_end(arguments) if is_sweep_end is None else is_sweep_end
        # Before backward, which hides the time of this sum.
        under_way = start_sum(own, self.communicator)
        shared = self._shared
        # Whether the next step is with this rank's own gradients.
        is_local = shared is None or shared.reducer.is_suspended
        if shared is not None:
            shared.reducer.contribution.set(own.num_samples, own.num_samples)
        if loss is not None:
            loss.backward()
        total = under_way()
        num_synchronized = self._num_synchronized()
        if not total.num_samples:
            if shared is not None:
                shared.flush()
            self._report_synchronization(num_synchronized)
            return False
        if shared is not None:
            if is_local:
                share = total.num_samples / shared.communicator.size
                shared.reducer.contribution.mean_samples = share
            if loss is None:
                # There was no backward pass, whose hooks begin the exchange: the others wait in it.
                shared.reducer.exchange_now()
        for optimizer in self.optimizers:
            self._step(optimizer, (own if is_local else total).num_samples)
            for learner in _learners(optimizer):
                learner.end_minibatch(total.num_samples, is_sweep_end=total.is_sweep_end)
        self._last = total
        self.total_number_of_samples_seen += total.num_samples
        self.num_minibatches += 1
        self.num_sweeps += total.is_sweep_end
        for writer in self.progress_writers:
            writer.update_training(total.num_samples, total.loss, total.metric)
        self._report_synchronization(num_synchronized)
        return True

    @contextmanager
    def _frozen_others(self) -> Iterator[None]:
        """Leave parameters that no learner of this trainer has without gradients, as in CNTK.

        They may belong to another trainer, as the discriminator that a generator is trained
        through: its optimizer would take their gradients for its own and exchange them.
        """
        own = {
            p for each in self.optimizers for group in each.param_groups for p in group["params"]
        }
        parameters = (p for model in self._models for p in model.parameters())
        others = [p for p in parameters if p.requires_grad and p not in own]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_()

    def _step(self, optimizer: Optimizer, num_samples: int) -> None:
        """Step one optimizer with the rates and momenta for a minibatch of ``num_samples``."""
        for learner in _learners(optimizer):
            learner.begin_minibatch(num_samples)
        optimizer.step()

    def _num_synchronized(self) -> float:
        """Samples over all ranks in the blocks that have ended."""
        schedule: object = None if self._shared is None else self._shared.schedule
        schedule = getattr(schedule, "schedule", schedule)  # after a warm-up
        return schedule.num_samples if isinstance(schedule, LocalUpdateSchedule) else 0.0

    def _report_synchronization(self, num_before: float) -> None:
        if added := round(self._num_synchronized() - num_before):
            for writer in self.progress_writers:
                writer.update_distributed_sync(added)

    def _evaluate(
        self,
        arguments: Mapping[str, Argument],
        device: torch.device | str | None,
        criterion: tuple[Criterion, Criterion | None],
    ) -> tuple[Tensor | None, MinibatchSums]:
        """The mean loss over this rank's samples, and the sums of loss and metric."""
        of_loss, of_metric = criterion
        if not isinstance(arguments, Mapping):
            raise UsageError(
                f"The arguments of a minibatch are of type {type(arguments).__name__}. They must "
                f"be a dict by name: the parameters of {type(self.model).__name__}.forward"
                f"({', '.join(self._model_names)}), and others for loss and metric. Give "
                f"{{{', '.join(f'{name!r}: ...' for name in [*self._model_names, 'labels'])}}}."
            )
        is_empty = all(_num_samples(value) == 0 for value in arguments.values())
        if is_empty and not (arguments and has_collective_layers(self.model)):
            return None, MinibatchSums(0.0, None if of_metric is None else 0.0)
        inputs, others = self._split(arguments, device)
        output = self.model(**inputs)
        count = _num_samples(next(iter((others or inputs).values())))
        num_sequences = min(map(_num_sequences, arguments.values()))
        value = of_loss(output, *others.values())
        loss, sum_, count = mean_and_sum("loss", value, count, num_sequences)
        sums = MinibatchSums(sum_, None, count)
        if of_metric is not None:
            with torch.no_grad():
                value = of_metric(output, *others.values())
            _, sums.metric, num_values = mean_and_sum("metric", value, count, num_sequences)
            if num_values != count:
                raise UsageError(
                    f"The loss has {count} values and the metric {num_values}. Both must have one "
                    "for each sample, or be a mean."
                )
        return loss, sums

    def _split(
        self, arguments: Mapping[str, Argument], device: torch.device | str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide arguments into those of the model and the others, all moved to the device."""
        inputs: dict[str, Any] = {}
        others: dict[str, Any] = {}
        where = device if device is not None else _device_of(self._models)
        for name, value in arguments.items():
            (inputs if name in self._model_names else others)[name] = _prepared(value, where)
        if not inputs:
            raise UsageError(
                f"None of the arguments ({', '.join(map(str, arguments))}) is a parameter of "
                f"{type(self.model).__name__}.forward({', '.join(self._model_names)}). Rename the "
                "keys of the input map, or the parameters of forward."
            )
        return inputs, others

    # ---- evaluation ----

    def test_minibatch(
        self, arguments: Mapping[str, Argument], device: torch.device | str | None = None
    ) -> float:
        """The mean of the metric, or without one of the loss, over all ranks. *Collective.*"""
        value, num_samples = self.evaluation_sums(arguments, device)
        return value / num_samples if num_samples else float("nan")

    @torch.no_grad()
    def evaluation_sums(
        self,
        arguments: Mapping[str, Argument],
        device: torch.device | str | None = None,
        *,
        criterion: Any = None,
    ) -> tuple[float, int]:
        """The sum of the metric, or without one of the loss, and the samples of all ranks.

        *Collective.* ``criterion`` is used in place of the trainer's.
        """
        used = self._criterion if criterion is None else _criteria(criterion)
        parts = (self.model, *used)
        with evaluation_mode(part for part in parts if isinstance(part, nn.Module)):
            _, own = self._evaluate(arguments, device, used)
        total = start_sum(own, self.communicator)()
        value = float(total.loss if total.metric is None else total.metric)
        if total.num_samples:
            for writer in self.progress_writers:
                writer.update_test(total.num_samples, value)
        return value, total.num_samples

    @property
    def previous_minibatch_loss_average(self) -> float:
        """The mean loss of the last minibatch over the samples of all ranks. Local."""
        return float(self._last.loss) / max(1, self._last.num_samples)

    @property
    def previous_minibatch_evaluation_average(self) -> float:
        """The mean metric of the last minibatch over the samples of all ranks. Local.

        Raises UsageError: this trainer has no metric.
        """
        if self._criterion[1] is None:
            raise UsageError("This trainer has no metric: give criterion=(loss, metric).")
        return float(self._last.metric or 0.0) / max(1, self._last.num_samples)

    @property
    def previous_minibatch_sample_count(self) -> int:
        """The samples of the last minibatch over all ranks. Local."""
        return self._last.num_samples

    def summarize_training_progress(self) -> None:
        """Write summaries of the training since the last ones. Local."""
        for writer in self.progress_writers:
            writer.write_training_summary()

    def summarize_test_progress(self) -> None:
        """Write summaries of the evaluation that has ended. Local."""
        for writer in self.progress_writers:
            writer.write_test_summary()

    # ---- checkpoints ----

    def save_checkpoint(
        self, filename: str | Path, external_state: Mapping[str, Any] | None = None
    ) -> None:
        """Save model, learners and counters in the folder ``filename``. *Collective.*"""
        checkpointer = self._checkpointer_of(filename)
        checkpointer.save(self.num_minibatches, self.stateful(dict(external_state or {})))
        checkpointer.finish()

    def restore_from_checkpoint(self, filename: str | Path) -> dict[str, Any]:
        """Continue from `save_checkpoint`; returns its ``external_state``. *Collective.*

        Raises DataError: there is no valid checkpoint in ``filename``.
        """
        external: dict[str, Any] = {}
        checkpointer = self._checkpointer_of(filename)
        checkpointer.resume(self.stateful(external))
        if checkpointer.resumed_from is None:
            raise DataError(
                f"There is no checkpoint in {Path(filename).absolute()}. Give the filename of a "
                "save_checkpoint(), and the same folder on all ranks."
            )
        return external

    def state_dict(self) -> dict[str, Any]:
        """The counters of this trainer and of its progress writers."""
        return {
            "num_samples": self.total_number_of_samples_seen,
            "num_minibatches": self.num_minibatches,
            "num_sweeps": self.num_sweeps,
            "writers": [writer.state_dict() for writer in self.progress_writers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        self.total_number_of_samples_seen = state["num_samples"]
        self.num_minibatches = state["num_minibatches"]
        self.num_sweeps = state["num_sweeps"]
        for writer, saved in zip(self.progress_writers, state["writers"], strict=False):
            writer.load_state_dict(saved)

    def stateful(self, external_state: dict[str, Any]) -> dict[str, Any]:
        """The objects that a checkpoint saves and loads, by name. Local.

        Loading replaces the contents of ``external_state``.
        """
        state: dict[str, Any] = {"trainer": self, "external": _Plain(external_state)}
        for number, model in enumerate(self._models):
            state[f"model{number or ''}"] = model
        for number, optimizer in enumerate(self.optimizers):
            state[f"learner{number or ''}"] = optimizer
        return state

    def _checkpointer_of(self, filename: str | Path) -> MultiNodeCheckpointer:
        path = Path(filename).absolute()
        if self._checkpointer is not None and self._checkpointer[0] != path:
            self._checkpointer[1].close()
            self._checkpointer = None
        if self._checkpointer is None:
            comm = self.communicator or default_communicator()
            made = create_multi_node_checkpointer(
                comm, path.parent, path.name, keep=1, on_failure="raise"
            )
            self._checkpointer = path, made
        return self._checkpointer[1]


class _Plain:
    """Saves and loads plain values with a checkpoint."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.clear()
        self.values.update(state)


def _learners(optimizer: Optimizer) -> list[Learner]:
    """The learners of this package that step with an optimizer."""
    inner = optimizer.inner if isinstance(optimizer, MultiNodeOptimizer) else optimizer
    each = inner.learners if isinstance(inner, LearnerSet) else [inner]
    return [learner for learner in each if isinstance(learner, Learner)]


def _criteria(criterion: Any) -> tuple[Criterion, Criterion | None]:
    if isinstance(criterion, (tuple, list)):
        if not 1 <= len(criterion) <= 2:
            raise UsageError("criterion must be a loss or (loss, metric).")
        return criterion[0], criterion[1] if len(criterion) == 2 else None
    return criterion, None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _forward(model: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of a model, also of one that torch has compiled."""
    return cast("Callable[..., Any]", getattr(model, "_orig_mod", model).forward)


def _parameter_names(model: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(_forward(model)).parameters.values()
    return [p.name for p in parameters if p.kind not in kinds]


def _values(value: Argument) -> Tensor | np.ndarray[Any, Any]:
    found = value.data if isinstance(value, MinibatchData) else value
    if not isinstance(found, Tensor):
        return np.asarray(found)
    return found.values() if found.layout == torch.sparse_csr else found


def _num_samples(value: Argument) -> int:
    if isinstance(value, MinibatchData):  # the samples in its sequences
        return value.num_samples
    found = num_samples(value if isinstance(value, Tensor) else np.asarray(value))
    return cast(int, found)  # an argument has rows


def _num_sequences(value: Argument) -> int:
    if isinstance(value, MinibatchData) and value.lengths is not None:
        return len(value.lengths)
    return _num_samples(value)


def _is_sweep_end(arguments: Mapping[str, Argument]) -> bool:
    return any(isinstance(v, MinibatchData) and v.sweep_end for v in arguments.values())


def _prepared(value: Argument, device: torch.device | str | None) -> Tensor | MinibatchData:
    """Move an argument to the device: single samples as a tensor, float64 arrays as float32."""
    if isinstance(value, MinibatchData):
        return value.to(device).data if value.lengths is None else value.to(device)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    array = np.asarray(value)
    narrow = array.astype(np.float32) if array.dtype == np.float64 else array
    return torch.as_tensor(narrow, device=device)


def _device_of(models: Sequence[nn.Module]) -> torch.device | None:
    return next((p.device for model in models for p in model.parameters()), None)
