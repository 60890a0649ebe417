"""`create_multi_node_evaluator`: an evaluator whose result is that of the whole set.

    value = sum over ranks, batches of (samples x value)  /  sum over ranks, batches of samples

in float64, bit-identical on every rank, for shards of any sizes. ChainerMN computed the unweighted
mean over ranks of unweighted means over batches, which is biased for uneven shards and short last
batches, and hung if a rank had an empty shard.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from pytorch_pfn_extras import reporting
from pytorch_pfn_extras.training import extension
from pytorch_pfn_extras.training.extensions.evaluator import DistributedEvaluator, Evaluator
from torch import nn

from torchmn.base import events
from torchmn.base.errors import UsageError, raise_if_unknown
from torchmn.comm import Communicator
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.comm.heartbeat import HeartbeatGather, work_of_all_ranks
from torchmn.data.batch_size import num_samples
from torchmn.train.evaluation.buffers import BUFFER_RULES, BufferRule, sync_buffers_
from torchmn.train.evaluation.evaluation_batches import (
    batch_to,
    call_with_batch,
    evaluation_mode,
    named_loaders,
    one_pass,
)
from torchmn.train.evaluation.sums import Sums, WeightedSums, means_of, merge_sums, raise_if_no_mean

EvaluatorLike = TypeVar("EvaluatorLike", bound=Evaluator)
Compatibility = Literal["chainermn"]


def create_multi_node_evaluator(
    evaluator: EvaluatorLike,
    comm: Communicator,
    *,
    buffers: BufferRule = "average",
    compat: Compatibility | None = None,
) -> EvaluatorLike:
    """Make an evaluator return the result of the whole set on every rank. *Collective.*

    The same object is returned; its ``evaluate()`` becomes *collective*. Each rank passes the
    loader of its own shard, of any size. A value that a batch reports is weighted by the batch's
    number of samples (see `torchmn.data.batch_size.num_samples`), a `Ratio` by its count, and a
    value that a custom ``evaluate()`` adds to its result by the samples of the rank. Ranks may take
    different amounts of time; if one raises, all others raise as well.

    Args:
        evaluator: a `pytorch_pfn_extras.training.extensions.Evaluator`, or one of a subclass. Its
            batches may also come from a ``SerialIterator(shard, n, repeat=False)``.
        comm: the ranks that participate.
        buffers: which running statistics are used: ``average`` (floating-point buffers are
            averaged over ranks, in place, others copied from rank 0), ``rank0`` or ``local``.
        compat: ``chainermn`` computes the unweighted mean over the batches of a rank and the
            unweighted mean over ranks that reported the value. ChainerMN did not change buffers:
            also pass ``buffers="local"`` to reproduce its numbers.

    Raises:
        UnknownNameError, UsageError: an argument is of the wrong kind.
        RankMismatchError: the ranks' arguments differ.

    ``evaluate()`` then raises UsageError: a value has no mean; CommunicationError: another rank
    raised.

    Example:
        >>> from pytorch_pfn_extras.reporting import Reporter, report
        >>> from pytorch_pfn_extras.training.extensions import Evaluator
        >>> model, loader = torch.nn.Linear(3, 1), [torch.ones(4, 3), torch.zeros(2, 3)]
        >>> evaluator = Evaluator(loader, model, eval_func=lambda x: report({"mean": x.mean()}))
        >>> evaluator = torchmn.create_multi_node_evaluator(evaluator, comm)
        >>> with Reporter():  # a trainer has one
        ...     result = evaluator.evaluate()
        >>> round(result["mean"], 4)  # of six samples
        0.6667
    """
    _raise_if_unusable(evaluator, buffers, compat)
    evaluator._iterators = named_loaders(evaluator._iterators)
    raise_if_values_differ(
        f"{comm.rank_label}: create_multi_node_evaluator() was called",
        comm.allgather_obj({"buffers": buffers, "compat": compat}),
        "All ranks must pass the same arguments.",
    )
    evaluation = _MultiNodeEvaluation(evaluator, comm, buffers, compat)
    evaluator.evaluate = evaluation  # type: ignore[assignment,method-assign]
    if comm.rank != 0:
        evaluator._progress_bar = False
    return evaluator


def _raise_if_unusable(evaluator: object, buffers: str, compat: str | None) -> None:
    if isinstance(evaluator, DistributedEvaluator) or not isinstance(evaluator, Evaluator):
        raise UsageError(
            f"create_multi_node_evaluator got a {type(evaluator).__name__}. It needs an Evaluator "
            "of pytorch_pfn_extras.training.extensions over the shard of one rank."
        )
    if isinstance(evaluator.evaluate, _MultiNodeEvaluation):
        raise UsageError(
            "This is a multi-node evaluator already. Call create_multi_node_evaluator once."
        )
    raise_if_unknown("rule for buffers", buffers, BUFFER_RULES)
    raise_if_unknown("compat", compat or "chainermn", ("chainermn",))


class _MultiNodeEvaluation:
    """The collective ``evaluate`` that replaces an evaluator's own."""

    def __init__(
        self,
        evaluator: Evaluator,
        comm: Communicator,
        buffers: BufferRule,
        compat: Compatibility | None,
    ) -> None:
        self._evaluator = evaluator
        self._evaluate_shard: Callable[[], Mapping[str, Any]] = evaluator.evaluate
        self._comm = comm
        self._buffers = buffers
        self._compat = compat

    @events.during("evaluation")
    def __call__(self) -> dict[str, float]:
        targets = self._evaluator.get_all_targets().values()
        sync_buffers_(targets, self._comm, self._buffers)
        what = f"evaluation '{self._evaluator.name or 'validation'}'"
        with work_of_all_ranks(self._comm, what) as gather, evaluation_mode(targets):
            shard = self._measure(gather)
        return _means(gather.finish(shard))

    def _measure(self, gather: HeartbeatGather) -> Sums:
        """Run the evaluator's own ``evaluate`` and note what each batch reports."""
        recorder = Recorder(gather.heartbeat)
        own_loaders = self._evaluator._iterators
        self._evaluator._iterators = {
            name: recorder.batches_of(loader) for name, loader in own_loaders.items()
        }
        try:
            with RecordingReporter(recorder):
                result = self._evaluate_shard()
        finally:
            self._evaluator._iterators = own_loaders
        if self._compat == "chainermn":
            return {name: (float(value), 1.0) for name, value in result.items()}
        return recorder.sums_of(result)


def _means(parts: list[Sums]) -> dict[str, float]:
    """The means over all ranks. Raises UsageError: a value without any weight."""
    merged = merge_sums(parts)
    for name, (_, weight) in merged.items():
        if weight == 0:
            raise UsageError(
                f"'{name}' has no samples on any rank, so it has no mean. Give the "
                "evaluator a loader that has samples on one rank at least, or report a Ratio with "
                "a count."
            )
    return means_of(merged)


class Recorder:
    """Collects the values of each batch with the number of its samples. Local."""

    def __init__(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        self.num_samples = 0
        self._heartbeat = heartbeat
        self._sums = WeightedSums()
        self._batch: dict[str, Any] | None = None
        self._batch_size: int | None = None

    def batches_of(self, loader: Any) -> Any:
        """Wrap a loader, so that this recorder is notified of each batch."""
        return _RecordedLoader(loader, self)

    def note(self, named: Mapping[str, Any]) -> None:
        """Note values that were reported for the current batch, by name."""
        if self._batch is not None:
            for name, value in named.items():
                raise_if_no_mean(name, value)
            self._batch.update(named)

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch, and end the one before."""
        self.end_batch()
        self._heartbeat()  # ranks with a shorter shard wait, and know that this one goes on
        self._batch, self._batch_size = {}, num_samples(batch)
        self.num_samples += self._batch_size or 0

    def end_batch(self) -> None:
        """Count what the batch reported. Raises UsageError: its number of samples is not known."""
        reported, self._batch = self._batch or {}, None
        for name, value in reported.items():
            if self._batch_size is None and not isinstance(value, tuple):
                raise UsageError(
                    f"'{name}' was reported for a batch whose number of samples is not known. "
                    "Report Ratio(sum, count)."
                )
            self._sums.add(name, value, self._batch_size or 0)

    def sums_of(self, result: Mapping[str, Any]) -> Sums:
        """Sum and weight of every name in the result of ``evaluate()``.

        A value that no batch reported comes from a custom ``evaluate()``: a mean over the samples
        of this rank, or a `Ratio`.
        """
        self.end_batch()
        for name, value in result.items():
            if name not in self._sums:
                self._sums.add(name, value, self.num_samples)
        return {name: pair for name, pair in self._sums.sums().items() if name in result}


class RecordingReporter(reporting.Reporter):
    """Passes reported values to a recorder, under the names that the current reporter gives."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._named = reporting.get_current_reporter()
        self.observation = self._named.observation
        self._recorder = recorder

    def report(self, values: Any, observer: nn.Module | None = None) -> None:
        """See `pytorch_pfn_extras.reporting.Reporter.report`."""
        # Only the reporter that the script has made knows the names of its observers.
        found: dict[str, Any] = {}
        with self._named.scope(found):
            self._named.report(values, observer)
        self._recorder.note(found)
        self.observation.update(found)


class _RecordedLoader:
    """A loader that notifies a recorder of its batches."""

    def __init__(self, loader: Any, recorder: Recorder) -> None:
        self._loader = loader
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._recorder.begin_batch(batch)
            yield batch
        self._recorder.end_batch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class GenericMultiNodeEvaluator(extension.Extension):
    """Base class: `calc_local` for every batch of every rank, `aggregate` once at the root.

    For scores that need all outputs at once, such as BLEU. Shards may be uneven or empty, and ranks
    may take different amounts of time. It reports nothing itself; calling it returns the result of
    `aggregate` on the root and None on other ranks.

    Args:
        comm: the ranks that participate.
        iterator: this rank's batches, iterated from the beginning at each call.
        target: a module, or several by name, set to evaluation mode during a call.
        device: batches are moved to it before `calc_local`; None does not move them.
        converter: moves a batch: ``converter(batch, device)``.
        root: the rank that aggregates.
        progress_hook: called after each batch with a tuple of one number: this rank's batches done.

    Example:
        >>> class Longest(torchmn.GenericMultiNodeEvaluator):
        ...     def calc_local(self, *words):  # for each batch, on every rank
        ...         return max(map(len, words))
        ...     def aggregate(self, results):  # once, at the root
        ...         return max(results)
        >>> Longest(comm, [("a", "abc"), ("ab",)], torch.nn.Identity())()
        3
    """

    trigger = (1, "epoch")
    default_name = "validation"
    priority = extension.PRIORITY_WRITER

    def __init__(
        self,
        comm: Communicator,
        iterator: Iterable[Any],
        target: nn.Module | Mapping[str, nn.Module],
        device: torch.device | str | None = None,
        converter: Callable[[Any, Any], Any] = batch_to,
        root: int = 0,
        *,
        progress_hook: Callable[[int], None] | None = None,
    ) -> None:
        if not 0 <= root < comm.size:
            raise UsageError(f"root={root} is outside 0..{comm.size - 1}.")
        self.comm = comm
        self.root = root
        self.iterator = one_pass(iterator)
        self.targets = {"main": target} if isinstance(target, nn.Module) else dict(target)
        self.device = device
        self.converter = converter
        self.progress_hook = progress_hook

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a batch, whose fields are the arguments. Override it. Local.

        None is not allowed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define calc_local().")

    def aggregate(self, results: list[Any]) -> Any:
        """Aggregate the results of all ranks. Override it. Called on the root only.

        ``results`` has the first batches of rank 0, 1, ..., then the second batches and so on.
        """
        raise NotImplementedError(f"{type(self).__name__} must define aggregate().")

    @events.during("evaluation")
    def __call__(self, manager: Any = None) -> Any:
        """Evaluate. *Collective.* Raises CommunicationError: another rank raised."""
        what = f"evaluation '{self.name or self.default_name}'"
        modes = evaluation_mode(self.targets.values())
        with work_of_all_ranks(self.comm, what) as gather, torch.no_grad(), modes:
            results = self._local_results(gather)
        gather.finish(None)  # raises if another rank has failed, which calls no gather_obj
        gathered = self.comm.gather_obj(results, self.root)
        with work_of_all_ranks(self.comm, what) as gather:
            result = None if gathered is None else self.aggregate(_round_robin(gathered))
        gather.finish(None)
        return result

    def _local_results(self, gather: HeartbeatGather) -> list[Any]:
        results = []
        for number, batch in enumerate(self.iterator, start=1):
            gather.heartbeat()
            result = call_with_batch(self.calc_local, self.converter(batch, self.device))
            if result is None:
                raise UsageError(
                    f"{type(self).__name__}.calc_local() returned None. Return the batch's result."
                )
            results.append(result)
            if self.progress_hook:
                self.progress_hook(number)
        return results


def _round_robin(parts: list[list[Any]]) -> list[Any]:
    num_rounds = max(map(len, parts))
    return [part[k] for k in range(num_rounds) for part in parts if k < len(part)]
