"""A server: it owns some parameters and applies what workers push, one push at a time.

    push k of worker i, gradient g:   v <- v + 1;   w <- update(w, g~)
    reply, once the slowest living worker has pushed k + lead - s times:   w, v

with s = max_staleness and lead = 1 if workers compute the next gradient while they wait (pipeline),
else 0. With delay compensation (Zheng et al. 2017)

    g~ = g + lambda * g * g * (w - w_i)      w_i: what worker i had pulled to compute g

Training comes in episodes, each ended by all living workers. When one begins, the server takes
parameters and optimizer state over from its own rank's model and optimizer, so that whatever was
loaded or changed in between counts; that is when all living workers have come to it.

Called from one thread per worker; everything happens under one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchmn.errors import PeerLostError, TimeLimitError
from torchmn.gradients.buckets import NamedParameter
from torchmn.schedules.parameter_server.shards import (
    Hyper,
    ShardMemory,
    host_copy,
    optimizer_like,
    set_hyper_parameters,
    state_of,
)

Stay = Callable[[], None]
"""Tells a waiting worker that its server is alive; called without the lock."""

_NOBODY_WAITS = 2**62
_SIGNS_PER_LIMIT = 4
"""How often within the time limit a waiting worker hears from its server."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all servers keep to."""

    max_staleness: int
    lead: int
    delay_compensation: float
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Push:
    """A gradient of one worker, or only that it made a step, for this server's parameters."""

    worker: int
    episode: int
    clock: int
    """How many steps the worker has made in this episode, this one included."""
    memory: ShardMemory
    """Holds the gradients; then the parameters."""
    has_gradients: bool = True
    absent: frozenset[str] = frozenset()
    """Parameters that have no gradient, and are left alone."""
    hyper: Hyper | None = None
    """The worker's options of the groups, if they are not those of its push before."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a worker learns beside the parameters."""

    version: int
    num_updates_late: int = 0
    num_steps_ahead: int = 0
    lost: tuple[int, ...] = ()
    """Workers that died; training goes on without them."""
    records: dict[int, Any] = field(default_factory=dict)


class ShardServer:
    """The server of ``parameters``, which are this rank's own; see above."""

    def __init__(
        self,
        rank: int,
        parameters: Sequence[NamedParameter],
        inner: Optimizer,
        num_workers: int,
        rules: Rules,
    ) -> None:
        self.rank = rank
        self.rules = rules
        self.parameters = list(parameters)
        self._inner = inner
        self._values = ShardMemory(parameters)
        self._stand_ins = {n: nn.Parameter(slot) for n, slot in self._values.slots.items()}
        self._optimizer = optimizer_like(
            inner, {parameter: self._stand_ins[name] for name, parameter in parameters}
        )
        self._changed = threading.Condition()
        self._alive = set(range(num_workers))
        self._lost: dict[int, str] = {}
        self._closed_because: str | None = None
        self._gave_up: TimeLimitError | None = None
        self._version = 0
        self._opened = self._episode = -1
        self._arrived = dict.fromkeys(range(num_workers), -1)
        self._done = dict.fromkeys(range(num_workers), -1)
        self._confirmed = dict.fromkeys(range(num_workers), -1)
        self._clocks = dict.fromkeys(range(num_workers), 0)
        self._hyper: dict[int, Hyper] = {}
        self._records: dict[int, Any] = {}
        self._pulled: dict[int, deque[_Pulled]] = {}
        self._news_s = time.monotonic()

    # ---- this rank's own thread ----

    def open(self, episode: int) -> None:
        """This rank's model and optimizer hold what the episode begins with."""
        with self._changed:
            self._opened = episode
            self._news()

    def close(self, why: str) -> None:
        """Answer nobody any more."""
        with self._changed:
            self._closed_because = why
            self._news()

    @property
    def lost(self) -> dict[int, str]:
        """Workers that died, with the reason."""
        return dict(self._lost)

    # ---- the workers' threads ----

    def push(self, push: Push, stay: Stay) -> Reply:
        """Apply a push; return when the worker may go on, with the parameters in its memory.

        Raises TimeLimitError: it may not, and no worker was heard of for ``timeout_s``.
        """
        worker, rules = push.worker, self.rules
        with self._changed:
            self._arrive(worker, push.episode)
            self._wait(lambda: self._has_begun(push.episode), push.episode, stay)
            if push.hyper is not None:
                self._hyper[worker] = push.hyper
            pulled = self._pulled[worker]
            base = pulled.popleft()
            num_late = self._version - base.version
            if push.has_gradients:
                self._apply(push, base)
            self._clocks[worker] = push.clock
            self._news()
            bound = push.clock + rules.lead - rules.max_staleness
            self._wait(lambda: self._slowest() >= bound, push.episode, stay)
            ahead = push.clock + rules.lead - min(self._slowest(), push.clock)
            push.memory.copy_(self._values)
            pulled.append(self._keep(base))
            return Reply(
                version=self._version,
                num_updates_late=num_late,
                num_steps_ahead=ahead,
                lost=tuple(self._lost),
            )

    def finish(
        self, worker: int, episode: int, memory: ShardMemory, record: Any, stay: Stay
    ) -> Reply:
        """The worker is done with this episode; return when all are, with the last parameters."""
        with self._changed:
            self._arrive(worker, episode)
            self._wait(lambda: self._has_begun(episode), episode, stay)
            self._done[worker] = episode
            self._records[worker] = record
            self._news()
            self._wait(lambda: all(self._done[w] >= episode for w in self._alive), episode, stay)
            memory.copy_(self._values)
            return Reply(version=self._version, lost=tuple(self._lost), records=dict(self._records))

    def confirm(self, worker: int, episode: int, stay: Stay) -> Reply:
        """The worker has all it needs of this episode; return when all have.

        So no rank ends its program, and its server, while another still asks for the state.
        """
        with self._changed:
            self._confirmed[worker] = episode
            self._news()
            self._wait(
                lambda: all(self._confirmed[w] >= episode for w in self._alive), episode, stay
            )
            return Reply(version=self._version)

    def state(self) -> dict[str, Any]:
        """The optimizer state of the stripe, by parameter's name. A copy."""
        with self._changed:
            self._raise_if_closed()
            return state_of(self._optimizer, self._stand_ins)

    def leave(self, worker: int, why: str | None = None) -> None:
        """The worker is no more: it has said so, or ``why``. Nobody waits for it."""
        with self._changed:
            self._alive.discard(worker)
            if why is None and self._arrived[worker] > self._done[worker]:
                why = "it has left in the middle of the training"
            if why is not None:
                self._lost[worker] = why
            self._news()

    # ---- inside, with the lock ----

    def _arrive(self, worker: int, episode: int) -> None:
        self._raise_if_closed()
        self._arrived[worker] = max(episode, self._arrived[worker])
        self._news()

    def _raise_if_closed(self) -> None:
        if self._closed_because is not None:
            if self._gave_up is not None:  # that is why it was closed, and names who is missed
                raise TimeLimitError(str(self._gave_up))
            raise PeerLostError(
                f"{self._closed_because} Its part of the parameters is lost to the others: end "
                "the training on all ranks with flush() or optimizer.join()."
            )

    def _news(self) -> None:
        self._news_s = time.monotonic()
        self._changed.notify_all()

    def _has_begun(self, episode: int) -> bool:
        if self._episode < episode <= self._opened and all(
            self._arrived[worker] >= episode for worker in self._alive
        ):
            self._begin(episode)
        return self._episode >= episode

    def _begin(self, episode: int) -> None:
        """Take over what this rank holds: all living workers came, nobody is served any more."""
        for name, parameter in self.parameters:
            self._values.slots[name].copy_(parameter.detach())
            stand_in = self._stand_ins[name]
            self._optimizer.state.pop(stand_in, None)
            if parameter in self._inner.state:
                self._optimizer.state[stand_in] = host_copy(self._inner.state[parameter])
        self._episode = episode
        self._version += 1
        self._clocks = dict.fromkeys(self._clocks, 0)
        self._hyper.clear()
        self._pulled = {
            worker: deque(self._keep(None) for _ in range(1 + self.rules.lead))
            for worker in self._alive
        }
        self._news()

    def _keep(self, free: _Pulled | None) -> _Pulled:
        """Remember what a worker pulls now, in memory that is free again."""
        if not self.rules.delay_compensation:
            return _Pulled(self._version, None)
        values = free.values if free is not None else None
        values = values or ShardMemory(self.parameters)
        values.copy_(self._values)
        return _Pulled(self._version, values)

    def _apply(self, push: Push, base: _Pulled) -> None:
        if push.worker in self._hyper:
            set_hyper_parameters(self._optimizer, self._hyper[push.worker])
        for name, stand_in in self._stand_ins.items():
            grad = push.memory.slots[name]
            if name in push.absent:
                stand_in.grad = None
                continue
            if base.values is not None:
                drift = self._values.slots[name] - base.values.slots[name]
                # |g|^2 for complex numbers, so that the diagonal stays real.
                size = (grad * grad.conj()).real if grad.is_complex() else grad * grad
                grad.add_(drift.mul_(size), alpha=self.rules.delay_compensation)
            stand_in.grad = grad
        if self._stand_ins:
            self._optimizer.step()
        self._version += 1

    def _slowest(self) -> int:
        """The clock of the slowest worker that is living and not done with this episode."""
        return min(
            (
                self._clocks[worker]
                for worker in self._alive
                if self._arrived[worker] == self._episode > self._done[worker]
            ),
            default=_NOBODY_WAITS,
        )

    def _wait(self, is_ready: Callable[[], bool], episode: int, stay: Stay) -> None:
        limit_s = self.rules.timeout_s
        sign_s = time.monotonic() + limit_s / _SIGNS_PER_LIMIT
        while not is_ready():
            self._raise_if_closed()
            now = time.monotonic()
            if now >= self._news_s + limit_s:
                self._gave_up = TimeLimitError(self._whom_we_wait_for(episode))
                raise self._gave_up
            if now < sign_s:
                self._changed.wait(min(sign_s, self._news_s + limit_s) - now)
                continue
            self._changed.release()
            try:
                stay()
            finally:
                self._changed.acquire()
            sign_s = now + limit_s / _SIGNS_PER_LIMIT

    def _whom_we_wait_for(self, episode: int) -> str:
        seen = []
        for worker in sorted(self._alive):
            if self._arrived[worker] < episode:
                seen.append(f"rank {worker} has not come to this part of the training")
            elif self._done[worker] < episode == self._arrived[worker]:
                seen.append(f"rank {worker} has made {self._clocks[worker]} steps")
        if self._opened < episode:
            seen.append(f"the server on rank {self.rank} was not given its parameters")
        return (
            f"no worker was heard of for {self.rules.timeout_s:g} s ({'; '.join(seen)}; at most "
            f"{self.rules.max_staleness} steps ahead are allowed). A rank may be slower than the "
            "limit (raise timeout_s=), may hang, or have left its loop without "
            "optimizer.join() or flush()."
        )


@dataclass
class _Pulled:
    """What a worker has pulled: the version, and the values if they are needed again."""

    version: int
    values: ShardMemory | None
