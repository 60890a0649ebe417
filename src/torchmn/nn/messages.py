"""Messages between the links of a chain: outputs forward, their gradients backward.

Each rank has one thread for each rank it sends to and one for each it receives from, so that a
message neither waits for the computation nor stops it. Each message has the format of
`torchmn.comm.point_to_point`, and a note that names its connection, its call and its micro-batch,
so that the receiver takes messages as they come.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from torchmn.base import events
from torchmn.base.errors import (
    CommunicationError,
    PeerLostError,
    RankMismatchError,
    TimeLimitError,
    UnsupportedError,
    UsageError,
)
from torchmn.comm import Communicator, object_codec
from torchmn.comm.engine import Engine, Work
from torchmn.comm.point_to_point import ENVELOPE_BYTES, new_bytes, opened, sealed
from torchmn.comm.transports.base import (
    BackoffTimeLimit,
    TimeLimit,
    Transport,
    abort_pending_receives,
)
from torchmn.nn.chain_graph import BACKWARD, FORWARD, Edge

_TAG = 1
_YEAR_S = 365 * 86400.0
_PAUSE_S = 0.0005  # the longest between two polls of a transport that polls
_LOOK_S = 0.5  # between two looks at a limit that another thread may end
_KINDS = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Place:
    """Identifies a message: ``kind`` is FORWARD for an output, BACKWARD for its gradient."""

    kind: str
    edge: Edge
    microbatch: int
    call: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The numbers that identify the message in its header."""
        return _KINDS.index(self.kind), self.edge.number, self.microbatch, self.call

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks that send and receive it."""
        ranks = self.edge.source.rank, self.edge.target.rank
        return ranks if self.kind == FORWARD else (ranks[1], ranks[0])

    def __str__(self) -> str:
        edge = self.edge
        what = (
            f"the output of {edge.source} for {edge.target}"
            if self.kind == FORWARD
            else f"the gradient that {edge.target} returns to {edge.source}"
        )
        return f"{what}, micro-batch {self.microbatch} of call {self.call}"


@dataclass(frozen=True)
class Samples:
    """Number of samples of a micro-batch, and of the whole batch."""

    of_part: int
    of_batch: int


@dataclass(frozen=True)
class Delivery:
    """An object that has arrived, and the samples that it belongs to."""

    obj: Any
    samples: Samples


class Messages:
    """The messages of this rank. *Collective* to make; then all methods are local."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._engines: dict[tuple[str, int], Engine] = {}
        self._limits: dict[tuple[str, int], BackoffTimeLimit] = {}
        self._sends: deque[tuple[Place, Work[None]]] = deque()
        self._pending: defaultdict[int, deque[Work[tuple[Any, ...]]]] = defaultdict(deque)
        self._arrived: dict[tuple[int, ...], Delivery] = {}
        self._calls = count()
        self._is_aborted = False
        self._is_closed = False
        up = comm.groups.new_transport("chain") if comm.size > 1 else None
        # Over NCCL the messages of two ranks are in one order, whatever their tags are: two
        # directions would wait for each other.
        has_one = comm.size == 1 or comm.device.type != "cuda"
        self._up, self._down = up, up if has_one else comm.groups.new_transport("chain_down")
        self._forget_close = comm.on_finalize(self.close)

    def new_call(self) -> int:
        """Number a new call of the chain, from 0.

        Raises CommunicationError: an earlier call has failed, and others wait for its messages.
        """
        if self._is_aborted and self._comm.size > 1:
            raise CommunicationError(
                f"{self._comm.rank_label}: this chain cannot be used after a call that has failed, "
                "as other ranks wait for its messages. Let the error end the script, or make the "
                "communicator and the chain again on all ranks."
            )
        call = next(self._calls)
        self._comm.flight_recorder.set_label(None, call)
        return call

    def send(self, place: Place, obj: Any, samples: Samples) -> None:
        """Start sending an object to the other end, and return at once.

        Its tensors must not change until it was sent. Raises UsageError: it cannot be sent.
        """
        own, peer = place.ends
        if peer == own:
            self._arrived[place.numbers] = Delivery(obj, samples)
            return
        numbers = (*place.numbers, samples.of_part, samples.of_batch)
        note = " ".join(map(str, numbers))
        try:
            message = object_codec.pack(obj, object_codec.Trust(), note=note)
        except UnsupportedError as error:
            raise UsageError(
                f"{self._comm.rank_label}: {place} holds an object of a type that links cannot "
                "exchange. Let a link return tensors, numbers, text or None, or tuples, lists and "
                f"dicts of them. ({error})"
            ) from error
        engine = self._engine("send", peer)
        self._sends.append((place, engine.submit(partial(self._send, place, message))))
        while self._sends and self._sends[0][1].done:  # so that their memory is free
            self._finish_send()

    def prefetch(self, source: int, num: int) -> None:
        """Start to receive the next messages of a rank, in the order in which it sends them."""
        engine = self._engine("receive", source)
        for _ in range(num):
            self._pending[source].append(engine.submit(partial(self._receive, source)))

    def delivery(self, place: Place) -> Delivery:
        """Wait for a message.

        Raises TimeLimitError, PeerLostError, RankMismatchError: it names both ends.
        """
        source = place.ends[0]
        while place.numbers not in self._arrived:
            if not self._pending[source]:
                self.prefetch(source, 1)
            work = self._pending[source].popleft()
            if not work.done:
                self._await(place, work, "recv", source)
            numbers, obj, samples, *_ = self._result(place, work, "is waiting for")
            if place.kind == FORWARD and numbers[0] == 0 and numbers[3] != place.call:
                self.abort()
                raise RankMismatchError(
                    f"{self._comm.rank_label} is waiting for {place}, but rank {source} is in call "
                    f"{numbers[3]}. Call forward() and forward_backward() equally often on all "
                    "ranks of the chain."
                )
            self._arrived[numbers] = Delivery(obj, samples)
        return self._arrived.pop(place.numbers)

    def finish_sends(self) -> None:
        """Wait until all that was sent has arrived. Raises as `delivery`."""
        while self._sends:
            self._finish_send()

    def abort(self) -> None:
        """End all messages in progress after a failure: no other will follow."""
        # First: a thread that makes a limit later sees this, and ends the limit itself.
        self._is_aborted = True
        for limit in list(self._limits.values()):
            limit.end()
        if any(not engine.is_idle for engine in self._engines.values()):
            for transport in self._transports():
                abort_pending_receives(transport)

    def close(self) -> None:
        """End the threads. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._forget_close()
        self.abort()
        for engine in self._engines.values():
            engine.close()
        for transport in self._transports():
            self._comm.groups.close_transport(transport)

    # ---- inside ----

    def _finish_send(self) -> None:
        place, work = self._sends[0]
        if not work.done:
            self._await(place, work, "send", place.ends[1])
        self._result(place, work, "is sending")
        self._sends.popleft()

    def _transports(self) -> list[Transport]:
        return [t for t in dict.fromkeys((self._up, self._down)) if t is not None]

    def _engine(self, direction: str, peer: int) -> Engine:
        engine = self._engines.get((direction, peer))
        if engine is None:
            engine = self._engines[direction, peer] = Engine(self._comm.device)
        return engine

    def _limit(self, direction: str, peer: int) -> TimeLimit:
        """A limit of a year: the computing thread applies the real one, from when it waits."""
        limit = self._limits[direction, peer] = BackoffTimeLimit(_YEAR_S, _PAUSE_S)
        if self._is_aborted:
            limit.end()
        return limit

    def _send(self, place: Place, message: object_codec.Message) -> None:
        peer = place.ends[1]
        limit = self._limit("send", peer)
        transport = self._up if place.ends[0] < peer else self._down
        assert transport is not None  # noqa: S101 - a message to another rank
        parts = [*sealed(message.head), *message.buffers]
        _exchange(transport, [(peer, part) for part in parts], [], limit)

    def _receive(self, source: int) -> tuple[Any, ...]:
        transport = self._up if source < self._comm.rank else self._down
        assert transport is not None  # noqa: S101 - a message of another rank
        limit = self._limit("receive", source)

        def receive(*parts: Tensor) -> None:
            _exchange(transport, [], [(source, part) for part in parts], limit)

        envelope = new_bytes(ENVELOPE_BYTES)
        receive(envelope)
        _, head = opened(envelope, receive)
        note, body, tensors = object_codec.unpack_head(head, self._comm.device)
        receive(*map(object_codec.as_bytes, tensors))
        obj = object_codec.unpack(body, tensors, object_codec.Trust())
        *numbers, of_part, of_batch = map(int, note.split())
        # Tensors by themselves as well: `Work.wait` orders the streams of those that it can see.
        return tuple(numbers), obj, Samples(of_part, of_batch), *tensors

    def _await(self, place: Place, work: Work[Any], name: str, peer: int) -> None:
        """Wait for a message, recorded as a collective of the two ranks."""
        comm = self._comm
        recorder, own = comm.flight_recorder, comm.rank
        # Apart from what the other end records, which waits for other messages of this group.
        group = f"{name}, rank {place.ends[0]} to rank {place.ends[1]}"
        recorder.register_group(group, [own, peer])
        wait = comm.world.wait()
        limit = wait.limit
        entry = recorder.begin(group, f"{name} of {place}", (), "-", limit.seconds, wait)
        with events.during("exchange"):
            while not (is_done := work.is_done_within(min(limit.left_s, _LOOK_S))):
                if limit.left_s == 0.0:
                    break
        recorder.end(entry, "done" if is_done else "late")
        if not is_done:
            self.abort()
            does = "waits for" if name == "recv" else "cannot send"
            raise TimeLimitError(
                f"{comm.rank_label} {does} {place}: rank {peer} has not answered within "
                f"{limit.seconds:g} s. {wait.reason} It may be slower than the limit (raise "
                "timeout_s=), may have ended, or may not have called forward_backward(): check its "
                "log."
            )

    def _result(self, place: Place, work: Work[Any], does: str) -> Any:
        try:
            return work.wait()
        except CommunicationError as error:
            self.abort()
            kind = type(error) if isinstance(error, (PeerLostError, RankMismatchError)) else None
            raise (kind or CommunicationError)(
                f"{self._comm.rank_label} {does} {place}: {error}"
            ) from error


def _exchange(
    transport: Transport,
    sends: Sequence[tuple[int, Tensor]],
    recvs: Sequence[tuple[int, Tensor]],
    limit: TimeLimit,
) -> None:
    """One exchange for CPU and one for CUDA tensors, which may use different libraries."""
    for is_cuda in (False, True):
        outgoing = [(p, t) for p, t in sends if t.is_cuda is is_cuda]
        incoming = [(p, t) for p, t in recvs if t.is_cuda is is_cuda]
        if outgoing or incoming:
            transport.exchange(outgoing, incoming, limit, _TAG)
