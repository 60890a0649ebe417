"""Shares of the global batch in proportion to the speeds of the ranks, so that they end together.

    cost t_i      seconds of a step in which rank i does not wait for other ranks
    speed s_i     n_i / t_i, for its share of n_i samples
    next share    in proportion to s_i

Where all t_i are equal, the shares stay. A part of t_i that does not depend on n_i slows
convergence, but does not change the limit. Shares differ as much as the speeds of the ranks do, and
means stay exact, since the optimizer weights ranks by samples.

Every `PERIOD` steps with the same shares the ranks gather the medians of their costs, from which
each of them computes the same new shares. So that they do not follow noise, they change only if the
slowest rank is expected to gain `MIN_GAIN`, and by at most a quarter at a time.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence

from torchmn.base import events
from torchmn.base.errors import UsageError
from torchmn.base.events import Observer
from torchmn.comm import Communicator
from torchmn.comm.collectives import allgather_for
from torchmn.comm.training_start import training_steps
from torchmn.data.batch_shares import BatchShares, in_proportion
from torchmn.data.global_sampler import GlobalSampler
from torchmn.record.timeline import Mark, StepClock, TrainingThread, clock_of

PERIOD = 10
MIN_GAIN = 0.05
_SCALE = 1 << 20  # of the proportions, as integers


class SpeedShares(BatchShares):
    """The shares of a `GlobalBatch`, which follow the speeds of its ranks.

    The shares of a batch depend on its place in the data alone: `_changes` has the place from which
    on each division holds, which is the same on all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._changes = [(0, [1] * comm.size)]
        self._time = _OwnTime(clock_of(comm.device.type))
        events.add(self._time)
        weakref.finalize(self, events.remove, self._time)
        self._num_measured = 0
        self._is_followed = False  # whether the script measures its steps
        self._num_steps = 0
        """Steps of optimizers when the pass began."""

    def before_next(self, num_received: int) -> None:
        """See `BatchShares.before_next`. Raises UsageError: a step was not measured."""
        steps = training_steps(self._comm).count or 0
        if num_received == 0:
            self._num_steps = steps
        if steps > self._num_steps and not self._is_followed and self._comm.size > 1:
            raise UsageError(
                f"{self._comm.rank_label}: GlobalBatch(shares='speed') follows the times that "
                "batch.micro_batches() measures, and the loop has made a step without it: the "
                "shares would stay as they are. Pass each batch through batch.micro_batches("
                "samples, optimizer), or leave shares= out."
            )

    def sizes(self, batch_size: int, at: int) -> list[int]:
        """See `BatchShares.sizes`. Each rank has a sample, if there are so many."""
        sizes = in_proportion(batch_size, self._changes[self._index_at(at)][1])
        while 0 in sizes and max(sizes) > 1:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[sizes.index(0)] += 1
        return sizes

    def state_at(self, at: int) -> list[list[int]]:
        """See `BatchShares.state_at`: the places and shares in force, and later ones."""
        return [[place, *shares] for place, shares in self._changes[self._index_at(at) :]]

    def load_state(self, state: Sequence[Sequence[int]]) -> None:
        """See `BatchShares.load_state`. Shares of another number of ranks begin equal again."""
        loaded = [(place, list(shares)) for place, *shares in state]
        if loaded and all(len(shares) == self._comm.size for _, shares in loaded):
            self._changes = loaded
        self._forget()

    def _index_at(self, at: int) -> int:
        return max(0, sum(place <= at for place, _ in self._changes) - 1)

    def step_begins(self, sampler: GlobalSampler) -> None:
        """Measure a step, and change the shares if it is time. *Collective*: all ranks, each step.

        Raises UsageError: batches with the old shares were drawn in another thread meanwhile.
        """
        self._is_followed = True
        self._time.end_step()
        begin, size = sampler.received_at
        is_full = size == sum(self.sizes(sampler.global_batch, begin))
        is_current = self._index_at(begin) == len(self._changes) - 1
        self._time.counts = is_full and is_current
        self._num_measured += self._time.counts
        if self._num_measured <= PERIOD:
            return
        own = self._time.median()
        found = allgather_for(self._comm, "times of steps", (own, sampler.samples_drawn))
        costs, drawn = zip(*found, strict=True)
        self._forget()
        now = self.sizes(sampler.global_batch, begin)
        following = next_shares(now, costs)
        if following == now:
            return
        place = max(drawn)
        if sampler.samples_drawn > place:
            raise UsageError(
                f"{self._comm.rank_label}: GlobalBatch(shares='speed') changes the shares between "
                "two steps, and another thread draws batches from its sampler at the same time. "
                "Iterate over the DataLoader in the thread that trains, or leave shares= out."
            )
        self._changes = [self._changes[-1], (place, following)]

    def _forget(self) -> None:
        self._num_measured = 0
        self._time.forget()


def next_shares(shares: Sequence[int], costs: Sequence[float]) -> list[int]:
    """Return the shares after these, with which the ranks had these costs; the same if they stay.

    >>> next_shares([16, 16], [1.0, 3.0]), next_shares([24, 8], [1.0, 1.04])
    ([20, 12], [24, 8])
    """
    total = sum(shares)
    if min(shares) < 1 or not min(costs) > 0:
        return list(shares)
    speeds = [share / cost for share, cost in zip(shares, costs, strict=True)]
    steps = [max(1, share // 4) for share in shares]
    wanted = [
        min(max(total * speed / sum(speeds), share - step, 1), share + step)
        for share, speed, step in zip(shares, speeds, steps, strict=True)
    ]
    found = in_proportion(total, [round(_SCALE * share) for share in wanted])
    if min(found) < 1:
        return list(shares)
    expected = [
        cost * after / before for cost, after, before in zip(costs, found, shares, strict=True)
    ]
    return found if max(expected) <= (1 - MIN_GAIN) * max(costs) else list(shares)


class _OwnTime(Observer):
    """The time of a rank's steps in which it does not wait for others, on the training thread."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._thread = TrainingThread(clock)
        self._depth = 0
        self._begin: Mark = None
        self._waits: list[tuple[Mark, Mark]] = []
        self._wait_begin: Mark = None
        self._steps: list[tuple[Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self.counts = False  # whether the step that runs is one to measure

    def phase(self, name: str, begins: bool) -> None:
        """See `Observer.phase`. Waiting for other ranks is the phase ``exchange``."""
        if name != "exchange" or not self._thread.is_current():
            return
        self._depth += 1 if begins else -1
        if begins and self._depth == 1:
            self._wait_begin = self._clock.mark()
        elif not begins and self._depth == 0:
            self._waits.append((self._wait_begin, self._clock.mark()))
        self._depth = max(0, self._depth)

    def end_step(self) -> None:
        """End the step that runs, and begin the next one."""
        self._thread.move()
        now = self._clock.mark()
        if self.counts and self._begin is not None:
            self._steps.append((self._begin, now, self._waits))
        self._begin, self._waits, self._depth = now, [], 0

    def median(self) -> float:
        """Return the median of the measured steps in seconds; 0 if none is known."""
        clock = self._clock
        known = [
            clock.seconds(begin, end) - sum(clock.seconds(*wait) for wait in waits)
            for begin, end, waits in self._steps
            if clock.is_over(end)
        ]
        return statistics.median(known) if known else 0.0

    def forget(self) -> None:
        """Forget the steps measured so far, and the one that runs."""
        self._steps, self._begin = [], None
