"""The batches of an updater, and the epochs that they make."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol, cast

import torch

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.data import GlobalSampler
from torchmn.data.batch_settings import BatchSettings
from torchmn.data.sub_dataset import length_of

_END = object()


class Progress(Protocol):
    """An object that knows how many epochs are done. Local."""

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""


class BatchSource(Progress, Protocol):
    """An endless source of batches that counts epochs, such as `torchmn.SerialIterator`. Local."""

    is_new_epoch: bool
    """Whether the last batch ended an epoch."""

    def __next__(self) -> Any:
        """Return the next batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state from which `load_state_dict` resumes with the very next batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


def batch_source(iterator: Any) -> BatchSource:
    """Return ``iterator`` if it counts epochs, else an `EpochLoader` over it.

    Raises UsageError: it can be iterated only once.
    """
    if all(hasattr(iterator, name) for name in ("epoch_detail", "is_new_epoch", "__next__")):
        source: BatchSource = iterator
        return source
    if not hasattr(iterator, "__iter__") or hasattr(iterator, "__next__"):
        raise UsageError(
            f"An updater got a {type(iterator).__name__} for its batches. It needs something that "
            "can be iterated again for each epoch, such as a DataLoader, or an iterator that "
            "counts epochs, such as torchmn.SerialIterator."
        )
    return EpochLoader(iterator)


def iterations_per_epoch(source: BatchSource) -> Fraction | None:
    """The mean number of iterations in an epoch; None if it is not known."""
    if hasattr(source, "iterations_per_epoch"):
        return cast("Fraction | None", source.iterations_per_epoch)
    dataset, batch_size = getattr(source, "dataset", None), getattr(source, "batch_size", None)
    if dataset is None or not isinstance(batch_size, int):
        return None
    return Fraction(len(dataset), batch_size)


class EpochLoader:
    """Passes over a DataLoader; each pass is an epoch. Local.

    ``set_epoch`` of its samplers and data set is called at the beginning of each pass. With a
    `GlobalSampler` as ``batch_sampler`` the state is the sampler's, and is valid for any number of
    ranks. With any other loader, resuming draws and skips the batches that were done. In both cases
    the state includes that of the random generator from which a loader draws a number when a pass
    begins: a resumed pass draws the same number, and the generator is then restored.

    >>> from torchmn.train import EpochLoader
    >>> loader = EpochLoader(torch.utils.data.DataLoader(range(4), batch_size=2))
    >>> next(loader), next(loader), loader.epoch
    (tensor([0, 1]), tensor([2, 3]), 1)
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        self.is_new_epoch = False
        self.previous_epoch_detail: float | None = None
        self._num_done = 0  # batches of the current pass, which may have begun in mid-epoch
        self._pass_length: int | None = None
        self._batches: Iterator[Any] | None = None
        self._ahead: Any = _END
        self._generator_state: torch.Tensor | None = None
        self._is_resumed = False
        """Whether the next pass continues one that began before the state was saved."""
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, GlobalSampler) else None
        if self._sampler is not None:
            self.epoch = self._sampler.epoch

    @property
    def epoch_detail(self) -> float:
        """See `BatchSource`. Without a length, it is known at the end of epochs only."""
        if self._sampler is not None:
            state = self._sampler_state()
            return state["epoch"] + state["position"] / max(self._sampler.dataset_length, 1)
        length = length_of(self.loader)
        return self.epoch + (self._num_done / length if length else 0.0)

    @property
    def iterations_per_epoch(self) -> Fraction | None:
        """See `iterations_per_epoch`."""
        length = length_of(self.loader)
        return None if length is None else Fraction(length)

    def __next__(self) -> Any:
        before = self.epoch_detail
        if self._batches is None:
            self._begin_pass()
        batch = self._draw()
        if batch is _END:
            raise UsageError(
                "The loader returned no batch. Every rank needs at least one per epoch: use fewer "
                "ranks, a smaller batch or drop_last=False."
            )
        self.previous_epoch_detail = before
        self.is_new_epoch = self._is_last()
        if self.is_new_epoch:
            self.epoch += 1
            self._num_done, self._batches = 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """See `BatchSource`."""
        is_in_progress = self._batches is not None or self._is_resumed
        state = self._generator_state if is_in_progress else self._own_generator_state()
        common = {"epoch": self.epoch, "generator": state}
        if self._sampler is None:
            return {**common, "num_done": self._num_done}
        sampler = dict(self._sampler_state())
        return {**common, "sampler": sampler, "is_in_progress": is_in_progress}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], comm: Communicator
    ) -> Mapping[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local."""
        own = states[comm.rank % len(states)]
        if self._sampler is not None:
            # Ranks seed workers differently: a new rank must not take over the seed of another.
            return {**own, "generator": None}
        length = length_of(self.loader)
        num_done = int(own["num_done"]) * len(states) // comm.size
        if length is not None:
            num_done = min(num_done, max(length - 1, 0))
        return {**own, "num_done": num_done}

    def resume_warnings(self) -> list[str]:
        """Warnings for loading a state of another number of ranks."""
        if self._sampler is not None:
            return []
        return [
            "The loader has no GlobalSampler and returns different samples on another number of "
            "ranks: in the current epoch, some are seen twice and some not at all. With "
            "DataLoader(batch_sampler=GlobalSampler(...)) none are lost or repeated."
        ]

    def batch_settings(self) -> BatchSettings | None:
        """The global batch that a checkpoint records; None without a `GlobalSampler`."""
        return None if self._sampler is None else self._sampler.batch_settings()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `BatchSource`. Raises UsageError: the state of another kind of iterator."""
        key = "sampler" if self._sampler is not None else "num_done"
        if key not in state:
            raise UsageError(
                f"The state of the batches has {', '.join(map(str, state))} but not '{key}'. It "
                "was saved with another kind of iterator: use the same one to resume."
            )
        self._batches, self.is_new_epoch, self._num_done = None, False, 0
        self.epoch = int(state["epoch"])
        if self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self.epoch = self._sampler.epoch
            self._is_resumed = bool(state.get("is_in_progress", False))
            self._generator_state = state.get("generator")
            own = getattr(self.loader, "generator", None)
            if not self._is_resumed and own is not None and self._generator_state is not None:
                own.set_state(self._generator_state)
        else:
            self._restore_pass(state["generator"], int(state["num_done"]))
        self.previous_epoch_detail = self.epoch_detail

    # ---- one pass ----

    def _begin_pass(self) -> None:
        loader = self.loader
        for name in ("batch_sampler", "sampler", "dataset"):
            set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        # A pass draws from the generator (order, seed of workers): its state now repeats the pass.
        generator = self._generator()
        now = generator.get_state()
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._generator_state is not None:
            generator.set_state(self._generator_state)
        self._generator_state = generator.get_state()
        self._pass_length = length_of(self.loader)
        if self._sampler is not None:
            self._pass_length = self._sampler.batches_left
        self._num_done = 0
        self._batches = iter(loader)
        if is_resumed and generator is torch.default_generator:
            generator.set_state(now)  # the number was drawn before the state was saved
        # Without a length only the end of the iterator, one batch ahead, shows the last batch.
        self._ahead = next(self._batches, _END) if self._pass_length is None else _END

    def _draw(self) -> Any:
        batches = self._batches
        if batches is None:
            return _END
        self._num_done += 1
        if self._pass_length is not None:
            return next(batches, _END)
        batch, self._ahead = self._ahead, next(batches, _END)
        return batch

    def _is_last(self) -> bool:
        if self._pass_length is None:
            return self._ahead is _END
        if self._num_done < self._pass_length:
            return False
        if self._batches is not None and next(self._batches, _END) is not _END:
            raise UsageError(
                f"The loader has the length {length_of(self.loader)} but returned more batches. "
                "Let its len() be the number of batches in an epoch."
            )
        return True

    # ---- state ----

    def _sampler_state(self) -> Mapping[str, int]:
        sampler = cast(GlobalSampler, self._sampler)
        if self._batches is None:
            return cast("Mapping[str, int]", sampler.state_dict())
        return cast("Mapping[str, int]", sampler.state_after(self._num_done))

    def _generator(self) -> torch.Generator:
        own = getattr(self.loader, "generator", None)
        return torch.default_generator if own is None else own

    def _own_generator_state(self) -> torch.Tensor | None:
        own = getattr(self.loader, "generator", None)
        return None if own is None else own.get_state()

    def _restore_pass(self, saved: torch.Tensor | None, num_done: int) -> None:
        """Draw again, with the same random numbers, the batches of this epoch that were done."""
        generator = self._generator()
        now = generator.get_state()
        if saved is not None:
            generator.set_state(saved)
        if num_done == 0:
            return
        self._begin_pass()
        for _ in range(num_done):
            if self._draw() is _END:
                raise UsageError(
                    f"In the state {num_done} batches of the epoch are done, but the loader "
                    "has fewer. Was it saved with another data set, batch size or number "
                    "of ranks?"
                )
        if generator is torch.default_generator:
            generator.set_state(now)
