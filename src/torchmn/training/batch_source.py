"""Where an updater's batches come from, and the epochs that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol, cast

import torch

from torchmn.data import GlobalSampler
from torchmn.data.serial_iterator import Ranks
from torchmn.errors import UsageError

_END = object()


class BatchSource(Protocol):
    """Batches without end, epoch by epoch. `torchmn.SerialIterator` is one. Local."""

    epoch: int
    """Epochs done."""
    is_new_epoch: bool
    """Whether the last batch ended an epoch."""

    @property
    def epoch_detail(self) -> float:
        """Epochs done, with the fraction of the current one."""

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; None before the first."""

    def __next__(self) -> Any:
        """The next batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """What `load_state_dict` needs to go on with the very next batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""


def batch_source(iterator: Any) -> BatchSource:
    """What was given, if it counts epochs itself, else `EpochLoader` over it.

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
    if isinstance(source, EpochLoader):
        length = source.full_length()
        return None if length is None else Fraction(length)
    dataset, batch_size = getattr(source, "dataset", None), getattr(source, "batch_size", None)
    if dataset is None or not isinstance(batch_size, int):
        return None
    return Fraction(len(dataset), batch_size)


class EpochLoader:
    """Passes over a DataLoader, one after the other; a pass is an epoch. Local.

    ``set_epoch`` of its samplers is called at the beginning of each pass. With a `GlobalSampler` as
    ``batch_sampler`` the state is the sampler's, and holds for any number of ranks. For any other
    loader resuming draws the batches that were done once more. In both cases the state holds that
    of the random generator that loaders take a number from when a pass begins: a pass that is gone
    on with takes the same one, and the generator is then where it was.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        self.is_new_epoch = False
        self.previous_epoch_detail: float | None = None
        self._num_done = 0  # batches of this epoch
        self._num_drawn = 0  # batches of the pass under way, which may have begun in mid-epoch
        self._pass_length: int | None = None
        self._batches: Iterator[Any] | None = None
        self._ahead: Any = _END
        self._generator_state: torch.Tensor | None = None
        self._is_resumed = False
        """Whether the next pass goes on with one that was begun before the state was saved."""
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, GlobalSampler) else None
        if self._sampler is not None:
            self.epoch = self._sampler.epoch

    @property
    def epoch_detail(self) -> float:
        """See `BatchSource`. Without a length, known at the ends of epochs only."""
        if self._sampler is not None:
            state = self._sampler_state()
            return state["epoch"] + state["position"] / max(self._sampler.dataset_length, 1)
        length = self.full_length()
        return self.epoch + (self._num_done / length if length else 0.0)

    def full_length(self) -> int | None:
        """Batches in a full pass."""
        try:
            return len(self.loader)
        except TypeError:  # so a DataLoader says that its data set has no length
            return None

    def __next__(self) -> Any:
        before = self.epoch_detail
        if self._batches is None:
            self._begin_pass()
        batch = self._draw()
        if batch is _END:
            raise UsageError(
                "The loader gave no batch. Every rank needs at least one per epoch: use fewer "
                "workers, a smaller batch or drop_last=False."
            )
        self.previous_epoch_detail = before
        self._num_done += 1
        self.is_new_epoch = self._is_last()
        if self.is_new_epoch:
            self.epoch += 1
            self._num_done, self._batches = 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """See `BatchSource`."""
        is_under_way = self._batches is not None or self._is_resumed
        state = self._generator_state if is_under_way else self._own_generator_state()
        if self._sampler is not None:
            sampler = dict(self._sampler_state())
            return {
                "epoch": self.epoch,
                "sampler": sampler,
                "generator": state,
                "is_under_way": is_under_way,
            }
        return {"epoch": self.epoch, "num_done": self._num_done, "generator": state}

    def reshard_state_dict(
        self, states: Sequence[Mapping[str, Any]], comm: Ranks
    ) -> Mapping[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local."""
        own = states[comm.rank % len(states)]
        if self._sampler is not None:
            # Workers of the loader begin with other random numbers, on each rank its own.
            return {**own, "generator": None}
        length = self.full_length()
        num_done = int(own["num_done"]) * len(states) // comm.size
        if length is not None:
            num_done = min(num_done, max(length - 1, 0))
        return {**own, "num_done": num_done}

    def resume_warnings(self) -> list[str]:
        """What does not hold when a state is loaded by another number of ranks, in sentences."""
        if self._sampler is not None:
            return []
        return [
            "The batches come from a loader without GlobalSampler, which gives other samples to "
            "another number of ranks: of the epoch under way some are seen twice and some not at "
            "all. With DataLoader(batch_sampler=GlobalSampler(...)) none are lost or repeated."
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `BatchSource`. Raises UsageError: the state of something else."""
        wanted = "sampler" if self._sampler is not None else "num_done"
        if wanted not in state:
            raise UsageError(
                f"The state of the batches has {', '.join(map(str, state))} but not '{wanted}'. It "
                "was saved with another kind of iterator: use the same one to go on."
            )
        self._batches, self.is_new_epoch = None, False
        self.epoch = int(state["epoch"])
        if self._sampler is not None:
            self._sampler.load_state_dict(state["sampler"])
            self._num_drawn, self._num_done = 0, 0
            self.epoch = self._sampler.epoch
            self._is_resumed = bool(state.get("is_under_way", False))
            self._generator_state = state.get("generator")
            own = getattr(self.loader, "generator", None)
            if not self._is_resumed and own is not None and self._generator_state is not None:
                own.set_state(self._generator_state)
        else:
            self._num_done = int(state["num_done"])
            self._restore_pass(state["generator"])
        self.previous_epoch_detail = self.epoch_detail

    # ---- one pass ----

    def _begin_pass(self) -> None:
        loader = self.loader
        for name in ("batch_sampler", "sampler"):
            set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        generator = self._generator()
        now = generator.get_state()
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._generator_state is not None:
            generator.set_state(self._generator_state)
        self._generator_state = generator.get_state()
        self._pass_length = self.full_length()
        if self._sampler is not None:
            left = self._sampler.dataset_length - self._sampler.position
            self._pass_length = -(-left // self._sampler.global_batch)
        self._num_drawn = 0
        self._batches = iter(loader)
        if is_resumed and generator is torch.default_generator:
            generator.set_state(now)  # the number was taken from it before the state was saved
        self._ahead = next(self._batches, _END) if self._pass_length is None else _END

    def _draw(self) -> Any:
        batches = self._batches
        if batches is None:
            return _END
        self._num_drawn += 1
        if self._pass_length is not None:
            return next(batches, _END)
        batch, self._ahead = self._ahead, next(batches, _END)
        return batch

    def _is_last(self) -> bool:
        if self._pass_length is None:
            return self._ahead is _END
        if self._num_drawn < self._pass_length:
            return False
        if self._batches is not None and next(self._batches, _END) is not _END:
            raise UsageError(
                f"The loader has the length {self.full_length()} but gave more batches. Let its "
                "len() be the number of batches in an epoch."
            )
        return True

    # ---- state ----

    def _sampler_state(self) -> Mapping[str, int]:
        sampler = cast(GlobalSampler, self._sampler)
        if self._batches is None:
            return cast("Mapping[str, int]", sampler.state_dict())
        return cast("Mapping[str, int]", sampler.state_after(self._num_drawn))

    def _generator(self) -> torch.Generator:
        own = getattr(self.loader, "generator", None)
        return torch.default_generator if own is None else own

    def _own_generator_state(self) -> torch.Tensor | None:
        own = getattr(self.loader, "generator", None)
        return None if own is None else own.get_state()

    def _restore_pass(self, saved: torch.Tensor | None) -> None:
        """Draw what was done of this epoch once more, with the random numbers of that time."""
        generator = self._generator()
        num_done = self._num_done
        now = generator.get_state()
        if saved is not None:
            generator.set_state(saved)
        if num_done == 0:
            return
        self._begin_pass()
        for _ in range(num_done):
            if self._draw() is _END:
                raise UsageError(
                    f"The state says that {num_done} batches of the epoch were done, but the "
                    "loader has fewer. Was it saved with another data set, batch size or number "
                    "of ranks?"
                )
        if generator is torch.default_generator:
            generator.set_state(now)
