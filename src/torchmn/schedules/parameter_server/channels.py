"""Between a worker and a server: each pair has its own channel and order, nothing takes any source.

A request is a header, a note (JSON, often empty) and, for a push, the gradients; a reply is a
header, a note and the parameters. Requests have one tag, replies another, and on either side each
channel has one thread: the worker's own (it talks to all servers at once), and one for each worker
at the server. While a server makes a worker wait it sends signs of life, so that the worker can
tell slow workers from a dead server. A rank that is its own server speaks to it through queues.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from torchmn.communicators import object_codec
from torchmn.compression import ErrorFeedback, StripeCodec
from torchmn.compression.nonfinite import NonfiniteTracker
from torchmn.errors import CommunicationError, PeerLostError, TimeLimitError, TorchmnError
from torchmn.gradients.buckets import NamedParameter
from torchmn.schedules.parameter_server.server import Push, Reply, ShardServer
from torchmn.schedules.parameter_server.shards import ShardMemory
from torchmn.transports.base import BackoffTimeLimit, Message, TimeLimit, Transport

_REQUEST, _REPLY = 1, 2
_HEADER = 8
_YEAR_S = 365 * 86400.0
_PAUSE_S = 0.001
"""The longest pause between polls, where a transport polls: of one thread, or per thread of many"""


class Kind(IntEnum):
    """What a worker asks for, or what a server answers."""

    PUSH = 0
    SKIP = 1
    """A step without a gradient."""
    FINISH = 2
    STATE = 3
    CONFIRM = 4
    GOODBYE = 5
    STAY = 6
    ANSWER = 7
    ERROR = 8


_WITH_PARAMETERS = (Kind.PUSH, Kind.SKIP, Kind.FINISH)
"""What is answered with the parameters."""


@dataclass(kw_only=True)
class Request:
    """What a worker asks of one server."""

    kind: Kind
    episode: int = 0
    clock: int = 0
    note: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Answer:
    """What a server has answered. The parameters are in the worker's memory."""

    reply: Reply
    state: dict[str, Any] = field(default_factory=dict)


class Channel(Protocol):
    """The server's end of a channel. One thread."""

    worker: int
    memory: ShardMemory
    """Holds the gradients of a push; then what is sent back."""

    def next_request(self) -> Request:
        """Wait for it, however long. Raises PeerLostError: the worker is gone."""

    def stay(self) -> None:
        """Give a sign of life."""

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer with the parameters, or the state."""

    def refuse(self, error: TorchmnError) -> None:
        """Answer with an error, which the worker raises."""

    def end(self) -> None:
        """Let `next_request` end with an error. From another thread."""


def run_channel(server: ShardServer, channel: Channel) -> None:
    """Serve one worker until it says goodbye or is gone. The thread of a channel."""
    worker = channel.worker
    try:
        while True:
            request = channel.next_request()
            if request.kind == Kind.GOODBYE:
                server.leave(worker)
                return
            try:
                answer = _serve(server, channel, request)
            except TorchmnError as error:
                channel.refuse(error)
            except Exception as error:  # of the user's optimizer: the worker raises it
                channel.refuse(CommunicationError(f"{type(error).__name__}: {error}"))
            else:
                channel.answer(request, answer)
    except TorchmnError as error:
        server.leave(worker, str(error))


def _serve(server: ShardServer, channel: Channel, request: Request) -> Answer:
    if request.kind == Kind.STATE:
        return Answer(reply=Reply(version=0), state=server.state())
    if request.kind == Kind.CONFIRM:
        return Answer(reply=server.confirm(channel.worker, request.episode, channel.stay))
    if request.kind == Kind.FINISH:
        record = request.note.get("record")
        reply = server.finish(channel.worker, request.episode, channel.memory, record, channel.stay)
        return Answer(reply=reply)
    push = Push(
        worker=channel.worker,
        episode=request.episode,
        clock=request.clock,
        memory=channel.memory,
        has_gradients=request.kind == Kind.PUSH,
        absent=frozenset(request.note.get("absent", ())),
        hyper=request.note.get("hyper"),
    )
    return Answer(reply=server.push(push, channel.stay))


# ---- without a network ----


class LocalChannel:
    """Both ends of the channel of a rank that is its own server. They share the memory."""

    def __init__(self, rank: int, memory: ShardMemory) -> None:
        self.worker = rank
        self.memory = memory
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._answers: SimpleQueue[Answer | TorchmnError | None] = SimpleQueue()

    def next_request(self) -> Request:
        """See `Channel.next_request`."""
        return self._requests.get()

    def stay(self) -> None:
        """See `Channel.stay`."""
        self._answers.put(None)

    def answer(self, request: Request, answer: Answer) -> None:
        """See `Channel.answer`."""
        self._answers.put(answer)

    def refuse(self, error: TorchmnError) -> None:
        """See `Channel.refuse`."""
        self._answers.put(error)

    def end(self) -> None:
        """See `Channel.end`."""
        self._requests.put(Request(kind=Kind.GOODBYE))

    def ask(self, request: Request) -> None:
        """The worker's end: ask, and go on."""
        self._requests.put(request)

    def wait(self, timeout_s: float) -> Answer:
        """The worker's end: the answer. Raises what the server raised."""
        while True:
            try:
                answer = self._answers.get(timeout=timeout_s)
            except Empty:
                raise TimeLimitError(
                    f"this rank's own server is silent for {timeout_s:g} s"
                ) from None
            if isinstance(answer, TorchmnError):
                raise answer
            if answer is not None:
                return answer


# ---- over a network ----


class NetworkChannel:
    """The server's end of a channel to another rank."""

    def __init__(
        self,
        transport: Transport,
        worker: int,
        parameters: Sequence[NamedParameter],
        codec: StripeCodec | None,
        *,
        timeout_s: float,
        trust: object_codec.Trust,
    ) -> None:
        self.worker = worker
        self.memory = ShardMemory(parameters)
        self._transport = transport
        self._timeout_s = timeout_s
        self._trust = trust
        self._codec = decoder_of(codec)
        self._incoming = wire_memory(self.memory, codec)
        self._patience: BackoffTimeLimit | None = None
        self._is_ended = False

    def next_request(self) -> Request:
        """See `Channel.next_request`."""
        header = torch.zeros(_HEADER, dtype=torch.int64, device="cpu")
        # Every thread of this rank polls, if its transport does: all of them together not often.
        self._patience = BackoffTimeLimit(_YEAR_S, _PAUSE_S * self._transport.size)
        if self._is_ended:
            self._patience.end()
        self._transport.exchange([], [(self.worker, header)], self._patience, _REQUEST)
        kind, episode, clock, note_nbytes = header[:4].tolist()
        note = torch.empty(note_nbytes, dtype=torch.uint8, device="cpu")
        recvs = [(self.worker, note)]
        if kind == Kind.PUSH:
            recvs += [(self.worker, buffer) for buffer in self._incoming]
        self._transport.exchange([], recvs, self._limit(), _REQUEST)
        if kind == Kind.PUSH and self._codec is not None:
            for buffer, layout, encoded in zip(
                self.memory.buffers, self.memory.layouts, self._incoming, strict=True
            ):
                if layout.numel:
                    self._codec.decode_stripe(encoded, layout, buffer)
            self._codec.nonfinite.clear()  # the worker has looked
        return Request(kind=Kind(kind), episode=episode, clock=clock, note=_read(note))

    def stay(self) -> None:
        """See `Channel.stay`."""
        self._send(Kind.STAY, {}, [])

    def answer(self, request: Request, answer: Answer) -> None:
        """See `Channel.answer`."""
        if request.kind == Kind.STATE:
            packed = object_codec.pack(answer.state, self._trust)
            self._send(Kind.ANSWER, packed.head, packed.buffers)
        else:
            payload = self.memory.buffers if request.kind in _WITH_PARAMETERS else []
            self._send(Kind.ANSWER, asdict(answer.reply), payload)

    def refuse(self, error: TorchmnError) -> None:
        """See `Channel.refuse`."""
        self._send(Kind.ERROR, {"kind": type(error).__name__, "text": str(error)}, [])

    def end(self) -> None:
        """See `Channel.end`."""
        self._is_ended = True
        if self._patience is not None:
            self._patience.end()

    def _send(self, kind: Kind, note: dict[str, Any] | bytes, payload: Sequence[Tensor]) -> None:
        written = _write(note)
        header = torch.tensor([kind, written.numel(), *[0] * (_HEADER - 2)], device="cpu")
        sends = [(self.worker, tensor) for tensor in (header, written, *payload)]
        self._transport.exchange(sends, [], self._limit(), _REPLY)

    def _limit(self) -> TimeLimit:
        return TimeLimit(self._timeout_s, lambda: False)


class ServerClient:
    """All servers as one worker sees them. One thread at a time.

    ``memory[server]`` holds the gradients of a push, then the parameters that came back.
    """

    def __init__(
        self,
        transport: Transport | None,
        memory: Mapping[int, ShardMemory],
        local: LocalChannel | None,
        codec: StripeCodec | None,
        *,
        timeout_s: float,
        trust: object_codec.Trust,
        rank_label: str,
    ) -> None:
        self.memory = memory
        self._speaker = rank_label
        self._transport = transport
        self._local = local
        self._codec = codec
        self._timeout_s = timeout_s
        self._trust = trust
        self._remote = [s for s in memory if local is None or s != local.worker]
        self._outgoing = {s: wire_memory(memory[s], codec) for s in self._remote}
        self._broken: CommunicationError | None = None

    def encode(self) -> list[str]:
        """Encode the gradients for servers elsewhere; names of those that cannot be, if any."""
        codec = self._codec
        if codec is None:
            return []
        for server in self._remote:
            memory = self.memory[server]
            for buffer, layout, encoded in zip(
                memory.buffers, memory.layouts, self._outgoing[server], strict=True
            ):
                if layout.numel:
                    codec.encode_stripe(buffer, layout, encoded)
        names = codec.nonfinite.names("encoding")
        codec.finish(is_valid=not names)
        return names

    def ask(
        self, kind: Kind, episode: int, clock: int, notes: Mapping[int, dict[str, Any]]
    ) -> dict[int, Answer]:
        """Ask all servers and wait for their answers.

        Raises PeerLostError, TimeLimitError: a server is gone or silent, or says that a worker is.
        """
        if self._broken is not None:
            raise CommunicationError(
                f"The servers cannot be used since an exchange failed: {self._broken}"
            ) from self._broken
        try:
            requests = {
                server: Request(kind=kind, episode=episode, clock=clock, note=notes.get(server, {}))
                for server in self.memory
            }
            return self._ask(requests)
        except CommunicationError as error:
            self._broken = type(error)(f"{self._speaker}: {error}")
            raise self._broken from error

    def _ask(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        if self._local is not None:
            self._local.ask(requests[self._local.worker])
        if self._transport is not None and self._remote:
            self._exchange(self._sends({s: requests[s] for s in self._remote}), [])
            answers = self._await(requests)
        if self._local is not None:
            # It may be told to stay for long, but is told so four times within the limit.
            answers[self._local.worker] = self._local.wait(self._timeout_s)
        return answers

    def goodbye(self, limit_s: float) -> None:
        """Tell all servers that this worker is no more; those that are gone need not hear it."""
        if self._local is not None:
            self._local.end()
        if self._transport is None or self._broken is not None:
            return
        limit = TimeLimit(limit_s, lambda: False)
        for server in self._remote:
            sends = self._sends({server: Request(kind=Kind.GOODBYE)})
            try:
                self._transport.exchange(sends, [], limit, _REQUEST)
            except CommunicationError:
                continue

    def _sends(self, requests: Mapping[int, Request]) -> list[Message]:
        sends: list[Message] = []
        for server, request in requests.items():
            note = _write(request.note)
            header = torch.tensor(
                [request.kind, request.episode, request.clock, note.numel(), 0, 0, 0, 0],
                device="cpu",
            )
            sends += [(server, header), (server, note)]
            if request.kind == Kind.PUSH:
                sends += [(server, buffer) for buffer in self._outgoing[server]]
        return sends

    def _await(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Answers of the servers elsewhere, in the order in which they come.

        All who have not answered are heard in each round: each of them says something within a
        part of the limit.
        """
        answers: dict[int, Answer] = {}
        waiting = list(self._remote)
        while waiting:
            headers = {s: torch.zeros(_HEADER, dtype=torch.int64, device="cpu") for s in waiting}
            self._exchange([], list(headers.items()), is_long=True)
            said = {s: header[:2].tolist() for s, header in headers.items()}
            speaking = [s for s in waiting if said[s][0] != Kind.STAY]
            notes = {s: torch.empty(said[s][1], dtype=torch.uint8, device="cpu") for s in speaking}
            recvs: list[Message] = []
            for server in speaking:
                recvs.append((server, notes[server]))
                kind = requests[server].kind
                if said[server][0] == Kind.ANSWER and kind in _WITH_PARAMETERS:
                    recvs += [(server, buffer) for buffer in self.memory[server].buffers]
            self._exchange([], recvs)
            for server in speaking:
                if said[server][0] == Kind.ERROR:
                    raise _error_of(server, _read(notes[server]))
                answers[server] = self._read_answer(server, requests[server], notes[server])
            waiting = [s for s in waiting if s not in answers]
        return answers

    def _read_answer(self, server: int, request: Request, note: Tensor) -> Answer:
        if request.kind != Kind.STATE:
            told = _read(note)
            told["records"] = {int(rank): record for rank, record in told["records"].items()}
            return Answer(reply=Reply(**told | {"lost": tuple(told["lost"])}))
        _, body, tensors = object_codec.unpack_head(note.numpy().tobytes(), torch.device("cpu"))
        self._exchange([], [(server, object_codec.as_bytes(tensor)) for tensor in tensors])
        return Answer(reply=Reply(version=0), state=object_codec.unpack(body, tensors, self._trust))

    def _exchange(
        self, sends: list[Message], recvs: list[Message], *, is_long: bool = False
    ) -> None:
        if self._transport is None:
            return
        limit: TimeLimit = (
            BackoffTimeLimit(self._timeout_s, _PAUSE_S)
            if is_long
            else TimeLimit(self._timeout_s, lambda: False)
        )
        tag = _REQUEST if sends else _REPLY
        try:
            self._transport.exchange(sends, recvs, limit, tag)
        except (PeerLostError, TimeLimitError) as error:
            servers = sorted({peer for peer, _ in (*sends, *recvs)})
            raise type(error)(
                f"a parameter server is gone or silent, one of ranks {servers}: {error} Its part "
                "of the parameters is lost: go on from the last checkpoint. A rank that serves "
                "must stay until all have come to flush() or the end of optimizer.join()."
            ) from error


def start_threads(server: ShardServer, channels: Sequence[Channel]) -> list[threading.Thread]:
    """One thread per worker."""
    threads = [
        threading.Thread(
            target=run_channel,
            args=(server, channel),
            name=f"torchmn-server{server.rank}-for{channel.worker}",
            daemon=True,
        )
        for channel in channels
    ]
    for thread in threads:
        thread.start()
    return threads


def wire_memory(memory: ShardMemory, codec: StripeCodec | None) -> list[Tensor]:
    """What travels for a memory: the memory itself, or bytes to encode it in."""
    if codec is None:
        return memory.buffers
    return [
        torch.zeros(codec.stripe_nbytes(layout), dtype=torch.uint8, device="cpu")
        for layout in memory.layouts
    ]


def decoder_of(codec: StripeCodec | None) -> StripeCodec | None:
    """What decodes on a thread of its own: a codec keeps notes, of which no two threads may."""
    if codec is None:
        return None
    decoder = copy.copy((codec.codec if isinstance(codec, ErrorFeedback) else codec).new_instance())
    decoder.nonfinite = NonfiniteTracker()
    return decoder


_ERRORS: dict[str, type[CommunicationError]] = {
    error.__name__: error for error in (TimeLimitError, PeerLostError)
}


def _error_of(server: int, told: Mapping[str, str]) -> CommunicationError:
    kind = _ERRORS.get(told["kind"], CommunicationError)
    return kind(f"the server on rank {server} says: {told['text']}")


def _write(note: dict[str, Any] | bytes) -> Tensor:
    if not note:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    raw = note if isinstance(note, bytes) else json.dumps(note).encode()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _read(note: Tensor) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(note.numpy().tobytes()) if note.numel() else {}
    return told
