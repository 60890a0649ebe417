"""The server of a shard: it owns some parameters and applies the workers' pushes, one at a time.

    push k of worker i, gradient g:   v <- v + 1;   w <- update(w, g)
    reply, once the slowest live worker has pushed k - max_staleness times:   w, v

Training is divided into episodes, each of which all live workers end together. When all live
workers have reached a new episode, the server copies parameters and optimizer state from its own
rank's model and optimizer, so that whatever was loaded or changed in between takes effect. Its own
rank is one of the workers: it trains, or ends each episode at once.

Each worker is served by a thread of its own; one lock guards the whole state.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import CommunicationError, TimeLimitError, TorchmnError
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.schedules.parameter_server.shards import (
    Hyper,
    ShardMemory,
    host_copy,
    optimizer_like,
)

# Tells a waiting worker that its server is alive. Called without the lock, as it sends a message.
Stay = Callable[[], None]

_NO_WORKER = 2**62
_SIGNS_PER_LIMIT = 4  # number of such messages to a waiting worker within the time limit
# The stages of a worker in an episode; those of the next episode follow.
_TRAINS, _HAS_ENDED, _HAS_RESULTS = 1, 2, 3
_NUM_STAGES = 3


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a worker pushes in a step."""

    gradients: list[Tensor]
    """The buffers of a `ShardMemory`."""
    absent: list[str]
    """Names of parameters without a gradient, which are not updated."""
    hyper: Hyper
    """The worker's options of the parameter groups."""


@dataclass(frozen=True)
class Reply:
    """What a worker receives: the buffers of a `ShardMemory` with the parameters, and more."""

    parameters: list[Tensor]
    num_updates_late: int = 0
    lost: tuple[int, ...] = ()  # workers that died; training continues without them


@dataclass
class _Worker:
    """What the server knows of a live worker."""

    stage: int = 0
    """How far it is: `_NUM_STAGES` for each episode that it has the results of."""
    clock: int = 0
    """Number of its steps in this episode."""
    pulled: int = 0
    """The version that it has pulled."""

    @property
    def trains(self) -> bool:
        """Whether it is inside of an episode."""
        return self.stage % _NUM_STAGES == _TRAINS


class ShardServer:
    """The server of ``parameters``, this rank's shard; see the description of the module."""

    def __init__(
        self,
        rank: int,
        parameters: Sequence[NamedParameter],
        inner: Optimizer,
        num_workers: int,
        *,
        max_staleness: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._max_staleness, self._timeout_s = max_staleness, timeout_s
        self.parameters = list(parameters)
        self._inner = inner
        self._gradients, self._values = ShardMemory(parameters), ShardMemory(parameters)
        slots = self._values.slots
        self._copies = {name: nn.Parameter(slot) for name, slot in slots.items()}
        self._optimizer = optimizer_like(
            inner, {parameter: self._copies[name] for name, parameter in parameters}
        )
        self._changed = threading.Condition()
        self._workers = {worker: _Worker() for worker in range(num_workers)}
        self.lost: set[int] = set()
        """Workers that died, or left while they trained."""
        self._closed: CommunicationError | None = None  # why all requests are rejected
        self._version = 0
        self._episode = -1  # the last one that has begun
        self._progress_s = time.monotonic()

    def close(self, error: CommunicationError) -> CommunicationError:
        """Reject all requests from now on. Returns the error that they raise: the first one given.

        Called from any thread.
        """
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()
            return self._closed

    def fail(self, error: BaseException) -> CommunicationError:
        """Reject all requests, as an error may have left an update half done. Returns the reason.

        Called from any thread.
        """
        failure = CommunicationError(
            f"the server on rank {self.rank} raised {type(error).__name__}: {error}. Its "
            "part of the parameters may be half updated: resume from the last checkpoint."
        )
        failure.__cause__ = error
        return self.close(failure)

    # ---- the workers' threads ----

    def answer(self, kind: str, worker: int, fields: dict[str, Any], stay: Stay) -> Any:
        """Perform a request of a worker: `push`, `finish`, `confirm` or `state`.

        ``stay`` is called from time to time while the worker has to wait. Raises TimeLimitError: it
        has to wait, and no worker made progress for ``timeout_s``. After an error of the user's
        optimizer all requests are rejected.
        """
        perform: dict[str, Callable[..., Any]] = {
            "push": self.push,
            "finish": self.finish,
            "confirm": self.confirm,
            "state": self.state,
        }
        try:
            with self._changed:
                self._raise_if_closed()
                return perform[kind](worker, stay, **fields)
        except TorchmnError:
            raise
        except BaseException as error:  # no worker may be left waiting
            raise self.fail(error) from error

    # ---- inside, with the lock ----

    def push(
        self,
        worker: int,
        stay: Stay,
        *,
        episode: int,
        update: Update | None,
    ) -> Reply:
        """Apply a push; return when the worker may continue, with the parameters.

        Args:
            worker: the rank of the worker.
            stay: see `answer`.
            episode: the number of the episode.
            update: what is to be applied; None: the step only counts.
        """
        self._enter(worker, episode, stay)
        own = self._workers[worker]
        num_late = self._version - own.pulled
        if update is not None:
            self._apply(update)
        own.clock += 1
        self._notify()
        self._wait(lambda: self._slowest() >= own.clock - self._max_staleness, episode, stay)
        own.pulled = self._version
        return self._reply(num_late)

    def finish(self, worker: int, stay: Stay, *, episode: int) -> Reply:
        """End this episode for a worker; return when all have, with the last parameters."""
        self._enter(worker, episode, stay)
        self._reach(worker, episode, _HAS_ENDED)
        self._wait(lambda: self._have_all(episode, _HAS_ENDED), episode, stay)
        return self._reply()

    def confirm(self, worker: int, stay: Stay, *, episode: int) -> None:
        """Note that a worker has all results of this episode; return when all workers have.

        This keeps a rank from exiting, and ending its server, while another requests the state.
        """
        self._reach(worker, episode, _HAS_RESULTS)
        self._wait(lambda: self._have_all(episode, _HAS_RESULTS), episode, stay)

    def state(self, worker: int, stay: Stay) -> dict[str, Any]:
        """Return a copy of the optimizer state of the shard, by parameter name."""
        states = self._optimizer.state
        return {n: host_copy(states[p]) for n, p in self._copies.items() if p in states}

    def leave(self, worker: int, *, is_lost: bool = False) -> None:
        """Stop waiting for a worker that has left. If it was training, it is lost as well."""
        with self._changed:
            left = self._workers.pop(worker, _Worker())
            if is_lost or left.trains:
                self.lost.add(worker)
            self._notify()

    def _reply(self, num_late: int = 0) -> Reply:
        parameters = [buffer.clone() for buffer in self._values.buffers]
        return Reply(parameters, num_late, tuple(self.lost))

    def _enter(self, worker: int, episode: int, stay: Stay) -> None:
        """Let a worker enter an episode, and wait until it has begun."""
        self._reach(worker, episode, _TRAINS)
        self._wait(lambda: self._has_begun(episode), episode, stay)

    def _reach(self, worker: int, episode: int, stage: int) -> None:
        own = self._workers[worker]
        own.stage = max(own.stage, _NUM_STAGES * episode + stage)
        self._notify()

    def _have_all(self, episode: int, stage: int) -> bool:
        """Whether all live workers have reached a stage of an episode, or a later one."""
        reached = _NUM_STAGES * episode + stage
        return all(worker.stage >= reached for worker in self._workers.values())

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(str(self._closed)) from self._closed

    def _notify(self) -> None:
        self._progress_s = time.monotonic()
        self._changed.notify_all()

    # Any thread that finds all workers arrived begins the episode, with the lock that it holds.
    def _has_begun(self, episode: int) -> bool:
        if self._episode < episode and self._have_all(episode, _TRAINS):
            self._begin(episode)
        return self._episode >= episode

    def _begin(self, episode: int) -> None:
        """Copy this rank's values, when all live workers have arrived and none is being served."""
        states, initial, slots = self._optimizer.state, self._inner.state, self._values.slots
        for name, parameter in self.parameters:
            slots[name].copy_(parameter.detach())
            copy = self._copies[name]
            states.pop(copy, None)
            if parameter in initial:
                states[copy] = host_copy(initial[parameter])
        self._episode = episode
        self._version += 1
        for worker in self._workers.values():
            worker.clock, worker.pulled = 0, self._version
        self._notify()

    def _apply(self, update: Update) -> None:
        self._gradients.fill(update.gradients)
        for group, values in zip(self._optimizer.param_groups, update.hyper, strict=True):
            group.update(values)
        for name, copy in self._copies.items():
            copy.grad = None if name in update.absent else self._gradients.slots[name]
        if self._copies:
            self._optimizer.step()
        self._version += 1

    def _slowest(self) -> int:
        """The clock of the slowest live worker that has not ended this episode."""
        clocks = [worker.clock for worker in self._workers.values() if worker.trains]
        return min(clocks, default=_NO_WORKER)

    def _wait(self, is_ready: Callable[[], bool], episode: int, stay: Stay) -> None:
        def is_over() -> bool:
            return is_ready() or self._closed is not None

        sign_s = self._timeout_s / _SIGNS_PER_LIMIT
        # Progress of any worker extends the limit: it tells that the job still runs.
        while not self._changed.wait_for(is_over, min(sign_s, self._left_s())):
            if not self._left_s():
                self.close(TimeLimitError(self._describe_wait(episode)))
                break
            # Sending may block for long, and other workers need the lock meanwhile.
            self._changed.release()
            try:
                stay()
            finally:
                self._changed.acquire()
        if not is_ready():
            self._raise_if_closed()

    def _left_s(self) -> float:
        """Seconds until the time limit, unless a worker makes progress."""
        return max(0.0, self._progress_s + self._timeout_s - time.monotonic())

    def _describe_wait(self, episode: int) -> str:
        seen = []
        for rank, worker in sorted(self._workers.items()):
            if worker.stage < _NUM_STAGES * episode + _TRAINS:
                seen.append(f"rank {rank} has not reached this part of the training")
            elif worker.trains:
                seen.append(f"rank {rank} has made {worker.clock} steps")
        return (
            f"no worker made progress for {self._timeout_s:g} s ({'; '.join(seen)}; at most "
            f"{self._max_staleness} steps ahead are allowed). A rank may be slower than the "
            "limit (raise timeout_s=), may hang, or have left its loop without optimizer.join() "
            "or flush()."
        )
