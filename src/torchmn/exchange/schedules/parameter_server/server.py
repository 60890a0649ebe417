"""The server of a shard: it owns some parameters and applies the workers' pushes, one at a time.

    push k of worker i, gradient g:   v <- v + 1;   w <- update(w, g~)
    reply, once the slowest live worker has pushed k + lead - s times:   w, v

with s = max_staleness and lead = 1 if workers compute the next gradient while they wait (pipeline),
else 0. With delay compensation (Zheng et al. 2017)

    g~ = g + lambda * g * g * (w - w_i)      w_i: what worker i had pulled to compute g

Training is divided into episodes, each of which all live workers end together. When all live
workers have reached a new episode, the server copies parameters and optimizer state from its own
rank's model and optimizer, so that whatever was loaded or changed in between takes effect.

Each worker is served by a thread of its own; one lock guards the whole state.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchmn.base.errors import CommunicationError, PeerLostError, TimeLimitError, TorchmnError
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.schedules.late_means import compensate_
from torchmn.exchange.schedules.parameter_server.shards import (
    Hyper,
    ShardMemory,
    host_copy,
    optimizer_like,
)

# Tells a waiting worker that its server is alive. Called without the lock, as it sends a message.
Stay = Callable[[], None]

# What a worker pulled: the version, and the values if they are needed again.
_Pulled = tuple[int, ShardMemory | None]
_NO_WORKER = 2**62
_SIGNS_PER_LIMIT = 4  # number of such messages to a waiting worker within the time limit


@dataclass(frozen=True)
class Reply:
    """The answer that a worker receives besides the parameters."""

    version: int
    num_updates_late: int = 0
    num_steps_ahead: int = 0
    lost: tuple[int, ...] = ()  # workers that died; training continues without them
    records: dict[int, Any] = field(default_factory=dict)


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
        lead: int,
        delay_compensation: float,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._max_staleness, self._lead = max_staleness, lead
        self._delay_compensation, self._timeout_s = delay_compensation, timeout_s
        self.parameters = list(parameters)
        self._inner = inner
        self._values = values = ShardMemory(parameters)
        self._copies = {n: nn.Parameter(slot) for n, slot in values.slots.items()}
        self._optimizer = optimizer_like(
            inner, {parameter: self._copies[name] for name, parameter in parameters}
        )
        self._changed = threading.Condition()
        self._alive = set(range(num_workers))
        self.lost: dict[int, str] = {}  # workers that died, with the reason
        self._time_limit_error: TimeLimitError | None = None
        self._closed: CommunicationError | None = None  # why all requests are rejected
        self._version = 0
        self._opened = self._episode = -1
        # The last episode that each worker has begun, ended, and has the results of.
        self._arrived, self._done, self._confirmed = (
            dict.fromkeys(range(num_workers), -1) for _ in range(3)
        )
        self._clocks = dict.fromkeys(range(num_workers), 0)
        self._records: dict[int, Any] = {}
        self._pulled: dict[int, deque[_Pulled]] = {}
        self._progress_s = time.monotonic()

    # ---- this rank's own thread ----

    def open(self, episode: int) -> None:
        """Note that this rank's model and optimizer hold the initial values of the episode."""
        with self._changed:
            self._opened = episode
            self._notify()

    def close(self, why: str) -> None:
        """Reject all requests from now on."""
        with self._changed:
            self._closed = self._closed or self._time_limit_error  # which names a rank
            self._closed = self._closed or PeerLostError(
                f"{why} Its part of the parameters is not available to the others: end the "
                "training on all ranks with flush() or optimizer.join()."
            )
            self._notify()

    def fail(self, error: BaseException) -> CommunicationError:
        """Reject all requests, as an error may have left an update half done. Returns the reason.

        Called from any thread.
        """
        with self._changed:
            if self._closed is None:
                self._closed = CommunicationError(
                    f"the server on rank {self.rank} raised {type(error).__name__}: {error}. Its "
                    "part of the parameters may be half updated: resume from the last checkpoint."
                )
                self._closed.__cause__ = error
            self._notify()
            return self._closed

    # ---- the workers' threads ----

    def answer(
        self, kind: str, worker: int, fields: dict[str, Any], memory: ShardMemory, stay: Stay
    ) -> Any:
        """Perform a request of a worker: `push` (or ``skip``), `finish`, `confirm` or `state`.

        Raises the errors of these methods. After an error of the user's optimizer the server
        rejects all requests.
        """
        try:
            if kind == "state":
                return self.state()
            if kind == "confirm":
                return self.confirm(worker, stay=stay, **fields)
            if kind == "finish":
                return self.finish(worker, memory=memory, stay=stay, **fields)
            has_gradients = kind == "push"
            return self.push(
                worker, memory=memory, stay=stay, has_gradients=has_gradients, **fields
            )
        except TorchmnError:
            raise
        except BaseException as error:  # no worker may be left waiting
            raise self.fail(error) from error

    def push(
        self,
        worker: int,
        *,
        episode: int,
        clock: int,
        memory: ShardMemory,
        stay: Stay,
        hyper: Hyper | None = None,
        absent: Collection[str] = (),
        has_gradients: bool = True,
    ) -> Reply:
        """Apply a push; return when the worker may continue, with the parameters in ``memory``.

        Args:
            worker: the rank of the worker.
            episode: the number of the episode.
            clock: number of steps of the worker in this episode, including this one.
            memory: holds the gradients, and receives the parameters.
            stay: called from time to time while the worker has to wait.
            hyper: the worker's options of the parameter groups.
            absent: names of parameters without a gradient, which are not updated.
            has_gradients: whether there are gradients to apply.

        Raises TimeLimitError: the worker may not continue, and no worker made progress for
        ``timeout_s``.
        """
        with self._changed:
            self._arrive(worker, episode)
            self._wait(lambda: self._has_begun(episode), episode, stay)
            pulled = self._pulled[worker]
            base = pulled.popleft()
            num_late = self._version - base[0]
            if has_gradients:
                self._apply(memory, absent, hyper, base)
            self._clocks[worker] = clock
            self._notify()
            bound = clock + self._lead - self._max_staleness
            self._wait(lambda: self._slowest() >= bound, episode, stay)
            ahead = clock + self._lead - min(self._slowest(), clock)
            memory.copy_(self._values)
            pulled.append(self._keep(base[1]))
            return Reply(self._version, num_late, ahead, tuple(self.lost))

    def finish(
        self, worker: int, episode: int, memory: ShardMemory, record: Any, stay: Stay
    ) -> Reply:
        """End this episode for a worker; return when all have, with the last parameters."""
        with self._changed:
            self._arrive(worker, episode)
            self._wait(lambda: self._has_begun(episode), episode, stay)
            self._done[worker] = episode
            self._records[worker] = record
            self._notify()
            self._wait(lambda: all(self._done[w] >= episode for w in self._alive), episode, stay)
            memory.copy_(self._values)
            return Reply(version=self._version, lost=tuple(self.lost), records=dict(self._records))

    def confirm(self, worker: int, episode: int, stay: Stay) -> None:
        """Note that a worker has all results of this episode; return when all workers have.

        This keeps a rank from exiting, and ending its server, while another requests the state.
        """
        with self._changed:
            self._confirmed[worker] = episode
            self._notify()
            confirmed = self._confirmed
            self._wait(lambda: all(confirmed[w] >= episode for w in self._alive), episode, stay)

    def state(self) -> dict[str, Any]:
        """Return a copy of the optimizer state of the shard, by parameter name."""
        with self._changed:
            self._raise_if_closed()
            states = self._optimizer.state
            return {n: host_copy(states[p]) for n, p in self._copies.items() if p in states}

    def leave(self, worker: int, why: str | None = None) -> None:
        """Stop waiting for a worker that has left, or is lost because of ``why``."""
        with self._changed:
            self._alive.discard(worker)
            if why is None and self._arrived[worker] > self._done[worker]:
                why = "it left before the end of the training"
            if why is not None:
                self.lost[worker] = why
            self._notify()

    # ---- inside, with the lock ----

    def _arrive(self, worker: int, episode: int) -> None:
        self._raise_if_closed()
        self._arrived[worker] = max(episode, self._arrived[worker])
        self._notify()

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(str(self._closed)) from self._closed

    def _notify(self) -> None:
        self._progress_s = time.monotonic()
        self._changed.notify_all()

    # Any thread that finds all workers arrived begins the episode, with the lock that it holds.
    def _has_begun(self, episode: int) -> bool:
        if self._episode < episode <= self._opened and all(
            self._arrived[worker] >= episode for worker in self._alive
        ):
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
        self._clocks = dict.fromkeys(self._clocks, 0)
        self._pulled = {
            worker: deque(self._keep(None) for _ in range(1 + self._lead)) for worker in self._alive
        }
        self._notify()

    def _keep(self, free: ShardMemory | None) -> _Pulled:
        """Keep the values that a worker pulls now; ``free`` is memory that may be used for it."""
        if not self._delay_compensation:
            return self._version, None
        values = free or ShardMemory(self.parameters)
        values.copy_(self._values)
        return self._version, values

    def _apply(
        self, memory: ShardMemory, absent: Collection[str], hyper: Hyper | None, base: _Pulled
    ) -> None:
        if hyper is not None:
            for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
                group.update(values)
        for name, copy in self._copies.items():
            grad = memory.slots[name]
            if name in absent:
                copy.grad = None
                continue
            if base[1] is not None:
                drift = self._values.slots[name] - base[1].slots[name]
                compensate_(grad, drift, self._delay_compensation)
            copy.grad = grad
        if self._copies:
            self._optimizer.step()
        self._version += 1

    def _slowest(self) -> int:
        """The clock of the slowest live worker that has not ended this episode."""
        active = [w for w in self._alive if self._arrived[w] == self._episode > self._done[w]]
        return min((self._clocks[worker] for worker in active), default=_NO_WORKER)

    def _wait(self, is_ready: Callable[[], bool], episode: int, stay: Stay) -> None:
        limit_s = self._timeout_s
        sign_s = time.monotonic() + limit_s / _SIGNS_PER_LIMIT
        while not is_ready():
            self._raise_if_closed()
            # Progress of any worker extends the limit: it tells that the job still runs.
            now, end_s = time.monotonic(), self._progress_s + limit_s
            if now >= end_s:
                self._time_limit_error = TimeLimitError(self._describe_wait(episode))
                raise self._time_limit_error
            if now < sign_s:
                self._changed.wait(min(sign_s, end_s) - now)
                continue
            # Sending may block for long, and other workers need the lock meanwhile.
            self._changed.release()
            try:
                stay()
            finally:
                self._changed.acquire()
            sign_s = now + limit_s / _SIGNS_PER_LIMIT

    def _describe_wait(self, episode: int) -> str:
        seen = []
        for worker in sorted(self._alive):
            if self._arrived[worker] < episode:
                seen.append(f"rank {worker} has not reached this part of the training")
            elif self._done[worker] < episode == self._arrived[worker]:
                seen.append(f"rank {worker} has made {self._clocks[worker]} steps")
        if self._opened < episode:
            seen.append(f"the server on rank {self.rank} has not received its parameters")
        return (
            f"no worker made progress for {self._timeout_s:g} s ({'; '.join(seen)}; at most "
            f"{self._max_staleness} steps ahead are allowed). A rank may be slower than the "
            "limit (raise timeout_s=), may hang, or have left its loop without optimizer.join() "
            "or flush()."
        )
