"""Detection of replicas that diverge, by comparing steps and checksums at each exchange.

A script can make replicas differ without torchmn's knowledge: it loads a state on one rank, skips a
step there, draws random numbers for parameters or gradients, has an embedding with ``max_norm=`` or
a buffer that forward changes. So the footer of each exchange holds how many steps each rank has
made since the previous exchange, and a checksum of a part of the parameters or buffers: another
part after every fourth step, so that all are covered in turn. No message is added, and the host
does not wait for a GPU.

If a script exchanges nothing between two passes over a loader (it changes parameters by hand, as
zeroth-order methods and evolution strategies do), the beginning of the next pass compares checksums
of all parameters with those of rank 0 (`PassFact`).

`torchmn.ReplicaCheck` and checkpoints compare all parameters and name what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchmn.base.errors import ResultWarning
from torchmn.base.torch_private import Normalization
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.exchange.buckets import elements_of
from torchmn.exchange.replicas import persistent_buffers

# Sent instead of a number by a rank that cannot compare: the sum is then negative, and none does.
UNKNOWN = -float(2**23)
EVERY = 4  # steps from one checksum to the next: a checksum takes longer than all else here
_PART_NUMEL = 65_536
_NUM_COLUMNS = 17
_LARGEST_SUM = 2**24  # of the squares of checksums over all ranks, which float32 holds exactly
_LARGEST_CHECKSUM = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched(NamedTuple):
    """A parameter or a buffer that must be the same on all ranks."""

    name: str
    get: Callable[[], Tensor | None]  # returns the current tensor: a script may replace a buffer
    is_buffer: bool = False


FindBuffers = Callable[[], Iterable[Watched]]


class ReplicaWatch:
    """This rank's steps since the last exchange, and its latest checksum. Local."""

    def __init__(self) -> None:
        # Steps since the last exchange; None if the other ranks may have made other steps.
        self.num_steps: int | None = None
        # A tensor of one element on the device of `part`; None if nothing is compared.
        self.checksum: Tensor | None = None
        self.part: Watched | None = None  # the tensor, a part of which the checksum is taken of
        self._watched: list[Watched] = []
        self._parameters: list[Watched] = []
        self._find_buffers: FindBuffers = tuple
        # Whether there was an exchange since the last pass over a loader began.
        self._has_exchanged = True
        self._warned_of: set[bool] = set()  # values of `Watched.is_buffer`

    def watch(
        self, parameters: Iterable[tuple[str, Tensor]], find_buffers: FindBuffers = tuple
    ) -> None:
        """Compare these parameters and buffers from now on; all ranks must have them."""
        self._parameters = [Watched(name, p.detach) for name, p in parameters if p.numel()]
        self._find_buffers = find_buffers
        self._watch_all()
        self.forget()

    def _watch_all(self) -> None:
        self._watched = [*self._parameters, *self._find_buffers()]

    def forget(self) -> None:
        """Compare nothing until the next step: parameters, ranks or counts have changed."""
        self.num_steps = self.checksum = None

    def exchanged(self) -> None:
        """Note that an exchange has taken the number of steps."""
        self.num_steps, self._has_exchanged = 0, True

    def step_ended(self) -> None:
        """Count a step of the optimizer."""
        if self.num_steps is not None:
            self.num_steps += 1

    def note(self, step: int, num_ranks: int) -> None:
        """Take the checksum that is due after step number ``step``, the same on all ranks."""
        turn, is_other = divmod(step, EVERY)
        if is_other:
            return
        if self._watched and turn % len(self._watched) == 0:  # buffers were added, as by pruning
            self._watch_all()
        watched = self._watched
        if not watched:
            return
        self.part = watched[turn % len(watched)]
        tensor = self.part.get()
        if tensor is None or not tensor.numel():
            self.checksum = None
            return
        bits = bits_of(tensor)
        num_parts = -(-bits.numel() // _PART_NUMEL)
        start = turn // len(watched) % num_parts * _PART_NUMEL
        # An odd modulus: bit patterns of round numbers end with zeros, and modulo a power of two
        # nothing else would be left.
        largest = min(_LARGEST_CHECKSUM, math.isqrt(_LARGEST_SUM // num_ranks))
        self.checksum = _checksum(bits[start : start + _PART_NUMEL], largest - 1 | 1)

    def at_pass(self) -> dict[str, int] | None:
        """See `PassFact.at_pass`: checksums by parameter name, None if an exchange has compared."""
        has_exchanged, self._has_exchanged = self._has_exchanged, False
        parameters = [(each.name, each.get()) for each in self._watched if not each.is_buffer]
        if has_exchanged or not parameters:
            return None
        return {
            name: int(bits_of(parameter).sum(dtype=torch.int64))
            for name, parameter in parameters
            if parameter is not None
        }

    def compare(self, comm: Communicator, own: dict[str, int], of_rank_0: dict[str, int]) -> None:
        """See `PassFact.compare`."""
        differing = [name for name in own if own[name] != of_rank_0.get(name, own[name])]
        if differing and False not in self._warned_of:
            self._warned_of.add(False)
            text = _OF_PARAMETERS.format(differing[0], "without an exchange of gradients")
            warn(f"{comm.rank_label}: {text}", ResultWarning)

    def warn(self, comm: Communicator, part: Watched | None, step: int) -> None:
        """Warn that checksums of a part differ: once for parameters, once for buffers."""
        if part is None or part.is_buffer in self._warned_of:
            return
        self._warned_of.add(part.is_buffer)
        what = _OF_BUFFERS if part.is_buffer else _OF_PARAMETERS
        warn(
            f"{comm.rank_label}: {what.format(part.name, f'after step {step}')}",
            ResultWarning,
        )


def _checksum(bits: Tensor, modulus: int) -> Tensor:
    """A number below ``modulus``, which also depends on the order: masks of pruning hold the same.

    Integers are summed by their position modulo a prime, as rows may be permuted.
    """
    end = bits.numel() // _NUM_COLUMNS * _NUM_COLUMNS
    sums = bits[:end].view(-1, _NUM_COLUMNS).sum(0, dtype=torch.int64)
    sums[: bits.numel() - end] += bits[end:]
    return ((sums % modulus) << torch.arange(_NUM_COLUMNS, device=bits.device)).sum() % modulus


_OF_PARAMETERS = (
    "the parameters of the ranks differ, as seen in '{}' {}. Each rank then trains "
    "another model. All ranks must change parameters in the same way: load a state on all of them, "
    "draw random numbers for parameters or gradients from a generator with the same seed, decide "
    "by values that all ranks share, and leave out max_norm= of embeddings. comm.bcast_data(model) "
    "makes them equal again, and torchmn.ReplicaCheck names what differs. (On hosts with different "
    "CPUs an optimizer may round differently.)"
)
_OF_BUFFERS = (
    "the ranks differ in the buffer '{}' {}. Only gradients are exchanged: a buffer "
    "that forward changes, such as a codebook that is a moving average or a queue of samples, is "
    "computed from this rank's part of each batch. Compute it in forward from the samples of all "
    "ranks (comm.allreduce of sums and counts, comm.allgather of samples), or call "
    "torchmn.train.evaluation.sync_buffers_([model], comm) before each step(), which averages "
    "buffers over ranks, or with rule='rank0' takes those of rank 0. (Running statistics of "
    "normalization layers are not compared. If each rank is meant to have its own, register the "
    "buffer with persistent=False.)"
)


def buffers_of_replicas(models: Sequence[nn.Module]) -> list[Watched]:
    """The buffers that are expected to be the same on all ranks. Local.

    Excluded are buffers that are not in a ``state_dict`` (caches), and those of normalization
    layers and quantization observers, which are statistics of a rank's own samples.
    """
    return [
        Watched(own.name, own.get, is_buffer=True)
        for model in models
        for own in persistent_buffers(model)
        if not isinstance(own.module, Normalization)
        and not type(own.module).__module__.startswith("torch.ao.")
    ]


def bits_of(parameter: Tensor) -> Tensor:
    """The bits of a tensor as integers, in the order of its memory if it is dense. Local."""
    values = elements_of(parameter)
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    return values.view(_INTEGERS[values.element_size()])
