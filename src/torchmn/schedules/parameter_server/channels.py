"""Messages between workers and servers. Each pair has its own channel with messages in order.

A request is a header, metadata (JSON, often empty) and, for a push, the gradients; a response is a
header, metadata and the parameters. Requests have one tag, responses another. Each end of a channel
has one thread: the worker's own (it communicates with all servers at once), and one for each worker
at the server. While a worker waits, its server sends keepalives, so that the worker can tell slow
workers from a dead server. A rank that is its own server communicates with it through queues.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

_REQUEST, _RESPONSE = 1, 2
_HEADER = 8
_YEAR_S = 365 * 86400.0
_PAUSE_S = 0.001
"""The longest pause between polls, for transports that poll; times the number of threads."""


class Kind(IntEnum):
    """The kind of a request, or of a response (`KEEPALIVE` and after)."""

    PUSH = 0
    SKIP = 1
    """A step without a gradient."""
    FINISH = 2
    STATE = 3
    CONFIRM = 4
    LEAVE = 5
    KEEPALIVE = 6
    RESULT = 7
    ERROR = 8


_WITH_PARAMETERS = (Kind.PUSH, Kind.SKIP, Kind.FINISH)
"""Requests whose response has the parameters."""


@dataclass(kw_only=True)
class Request:
    """A request of a worker to one server."""

    kind: Kind
    episode: int = 0
    clock: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Response:
    """A server's response. The parameters are in the worker's memory."""

    reply: Reply
    state: dict[str, Any] = field(default_factory=dict)


class Channel(Protocol):
    """The server's end of a channel. One thread."""

    worker: int
    memory: ShardMemory
    """Holds the gradients of a push; then the parameters of the response."""

    def next_request(self) -> Request:
        """Wait for a request, without limit. Raises PeerLostError: the worker is gone."""

    def keep_alive(self) -> None:
        """Send a keepalive."""

    def respond(self, request: Request, response: Response) -> None:
        """Send the parameters, or the state."""

    def send_error(self, error: TorchmnError) -> None:
        """Send an error, which the worker raises."""

    def end(self) -> None:
        """Make `next_request` raise. From another thread."""


def run_channel(server: ShardServer, channel: Channel) -> None:
    """Serve one worker until it leaves or is lost. The thread of a channel."""
    worker = channel.worker
    try:
        while True:
            request = channel.next_request()
            if request.kind == Kind.LEAVE:
                server.leave(worker)
                return
            try:
                response = _serve(server, channel, request)
            except TorchmnError as error:
                channel.send_error(error)
            else:
                channel.respond(request, response)
    except TorchmnError as error:
        server.leave(worker, str(error))
    except BaseException as error:  # of the user's optimizer, or of torch: no worker may wait
        failure = server.fail(error)
        with suppress(Exception):  # the connection may be what failed
            channel.send_error(failure)


def _serve(server: ShardServer, channel: Channel, request: Request) -> Response:
    if request.kind == Kind.STATE:
        return Response(reply=Reply(version=0), state=server.state())
    if request.kind == Kind.CONFIRM:
        return Response(reply=server.confirm(channel.worker, request.episode, channel.keep_alive))
    if request.kind == Kind.FINISH:
        record = request.metadata.get("record")
        reply = server.finish(
            channel.worker, request.episode, channel.memory, record, channel.keep_alive
        )
        return Response(reply=reply)
    push = Push(
        worker=channel.worker,
        episode=request.episode,
        clock=request.clock,
        memory=channel.memory,
        has_gradients=request.kind == Kind.PUSH,
        absent=frozenset(request.metadata.get("absent", ())),
        hyper=request.metadata.get("hyper"),
    )
    return Response(reply=server.push(push, channel.keep_alive))


# ---- without a network ----


class LocalChannel:
    """Both ends of the channel of a rank that is its own server. They share the memory."""

    def __init__(self, rank: int, memory: ShardMemory) -> None:
        self.worker = rank
        self.memory = memory
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._responses: SimpleQueue[Response | TorchmnError | None] = SimpleQueue()

    def next_request(self) -> Request:
        return self._requests.get()

    def keep_alive(self) -> None:
        self._responses.put(None)

    def respond(self, request: Request, response: Response) -> None:
        self._responses.put(response)

    def send_error(self, error: TorchmnError) -> None:
        self._responses.put(error)

    def end(self) -> None:
        self._requests.put(Request(kind=Kind.LEAVE))

    def send(self, request: Request) -> None:
        """The worker's end: send a request and return at once."""
        self._requests.put(request)

    def wait(self, timeout_s: float) -> Response:
        """The worker's end: wait for the response. Raises what the server raised."""
        while True:
            try:
                response = self._responses.get(timeout=timeout_s)
            except Empty:
                raise TimeLimitError(
                    f"this rank's own server has not responded for {timeout_s:g} s"
                ) from None
            if isinstance(response, TorchmnError):
                raise response
            if response is not None:
                return response


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
        self._incoming = message_buffers(self.memory, codec)
        self._limit: BackoffTimeLimit | None = None
        self._is_ended = False

    def next_request(self) -> Request:
        header = torch.zeros(_HEADER, dtype=torch.int64, device="cpu")
        # If the transport polls, every thread of this rank does: together not too often.
        self._limit = BackoffTimeLimit(_YEAR_S, _PAUSE_S * self._transport.size)
        if self._is_ended:
            self._limit.end()
        self._transport.exchange([], [(self.worker, header)], self._limit, _REQUEST)
        kind, episode, clock, nbytes = header[:4].tolist()
        metadata = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        recvs = [(self.worker, metadata)]
        if kind == Kind.PUSH:
            recvs += [(self.worker, buffer) for buffer in self._incoming]
        self._transport.exchange([], recvs, self._time_limit(), _REQUEST)
        if kind == Kind.PUSH and self._codec is not None:
            for buffer, layout, encoded in zip(
                self.memory.buffers, self.memory.layouts, self._incoming, strict=True
            ):
                if layout.numel:
                    self._codec.decode_stripe(encoded, layout, buffer)
            self._codec.nonfinite.clear()  # the worker has checked
        return Request(kind=Kind(kind), episode=episode, clock=clock, metadata=_read(metadata))

    def keep_alive(self) -> None:
        self._send(Kind.KEEPALIVE, {}, [])

    def respond(self, request: Request, response: Response) -> None:
        if request.kind == Kind.STATE:
            packed = object_codec.pack(response.state, self._trust)
            self._send(Kind.RESULT, packed.head, packed.buffers)
        else:
            payload = self.memory.buffers if request.kind in _WITH_PARAMETERS else []
            self._send(Kind.RESULT, asdict(response.reply), payload)

    def send_error(self, error: TorchmnError) -> None:
        self._send(Kind.ERROR, {"kind": type(error).__name__, "text": str(error)}, [])

    def end(self) -> None:
        self._is_ended = True
        if self._limit is not None:
            self._limit.end()

    def _send(
        self, kind: Kind, metadata: dict[str, Any] | bytes, payload: Sequence[Tensor]
    ) -> None:
        written = _write(metadata)
        header = torch.tensor([kind, written.numel(), *[0] * (_HEADER - 2)], device="cpu")
        sends = [(self.worker, tensor) for tensor in (header, written, *payload)]
        self._transport.exchange(sends, [], self._time_limit(), _RESPONSE)

    def _time_limit(self) -> TimeLimit:
        return TimeLimit(self._timeout_s, lambda: False)


class ServerClient:
    """A worker's connections to all servers. One thread at a time.

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
        self._rank_label = rank_label
        self._transport = transport
        self._local = local
        self._codec = codec
        self._timeout_s = timeout_s
        self._trust = trust
        self._remote = [s for s in memory if local is None or s != local.worker]
        self._outgoing = {s: message_buffers(memory[s], codec) for s in self._remote}
        self._broken: CommunicationError | None = None

    def encode(self) -> list[str]:
        """Encode the gradients for servers of other ranks; returns names of those out of range."""
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

    def request(
        self, kind: Kind, episode: int, clock: int, metadata: Mapping[int, dict[str, Any]]
    ) -> dict[int, Response]:
        """Send a request to all servers and wait for their responses.

        Raises PeerLostError, TimeLimitError: a server is lost or silent, or reports this of a
        worker.
        """
        if self._broken is not None:
            raise CommunicationError(
                f"The servers cannot be used since an exchange failed: {self._broken}"
            ) from self._broken
        try:
            requests = {
                server: Request(
                    kind=kind, episode=episode, clock=clock, metadata=metadata.get(server, {})
                )
                for server in self.memory
            }
            return self._request(requests)
        except CommunicationError as error:
            self._broken = type(error)(f"{self._rank_label}: {error}")
            raise self._broken from error

    def _request(self, requests: Mapping[int, Request]) -> dict[int, Response]:
        responses: dict[int, Response] = {}
        if self._local is not None:
            self._local.send(requests[self._local.worker])
        if self._transport is not None and self._remote:
            self._exchange(self._sends({s: requests[s] for s in self._remote}), [])
            responses = self._await(requests)
        if self._local is not None:
            # It may wait for long, but receives four keepalives within the limit.
            responses[self._local.worker] = self._local.wait(self._timeout_s)
        return responses

    def leave(self, limit_s: float) -> None:
        """Tell all servers that this worker leaves; servers that are lost are ignored."""
        if self._local is not None:
            self._local.end()
        if self._transport is None or self._broken is not None:
            return
        limit = TimeLimit(limit_s, lambda: False)
        for server in self._remote:
            sends = self._sends({server: Request(kind=Kind.LEAVE)})
            try:
                self._transport.exchange(sends, [], limit, _REQUEST)
            except CommunicationError:
                continue

    def _sends(self, requests: Mapping[int, Request]) -> list[Message]:
        sends: list[Message] = []
        for server, request in requests.items():
            metadata = _write(request.metadata)
            header = torch.tensor(
                [request.kind, request.episode, request.clock, metadata.numel(), 0, 0, 0, 0],
                device="cpu",
            )
            sends += [(server, header), (server, metadata)]
            if request.kind == Kind.PUSH:
                sends += [(server, buffer) for buffer in self._outgoing[server]]
        return sends

    def _await(self, requests: Mapping[int, Request]) -> dict[int, Response]:
        """The responses of servers on other ranks, in the order in which they arrive.

        Each round receives from all servers that have not responded: each of them sends at least a
        keepalive within a part of the limit.
        """
        responses: dict[int, Response] = {}
        waiting = list(self._remote)
        while waiting:
            headers = {s: torch.zeros(_HEADER, dtype=torch.int64, device="cpu") for s in waiting}
            self._exchange([], list(headers.items()), is_long=True)
            kinds = {s: Kind(int(header[0])) for s, header in headers.items()}
            responding = [s for s in waiting if kinds[s] != Kind.KEEPALIVE]
            metadata = {
                s: torch.empty(int(headers[s][1]), dtype=torch.uint8, device="cpu")
                for s in responding
            }
            recvs: list[Message] = []
            for server in responding:
                recvs.append((server, metadata[server]))
                kind = requests[server].kind
                if kinds[server] == Kind.RESULT and kind in _WITH_PARAMETERS:
                    recvs += [(server, buffer) for buffer in self.memory[server].buffers]
            self._exchange([], recvs)
            for server in responding:
                if kinds[server] == Kind.ERROR:
                    raise _error_from(server, _read(metadata[server]))
                responses[server] = self._read_response(server, requests[server], metadata[server])
            waiting = [s for s in waiting if s not in responses]
        return responses

    def _read_response(self, server: int, request: Request, metadata: Tensor) -> Response:
        if request.kind != Kind.STATE:
            fields = _read(metadata)
            fields["records"] = {int(rank): record for rank, record in fields["records"].items()}
            return Response(reply=Reply(**fields | {"lost": tuple(fields["lost"])}))
        _, body, tensors = object_codec.unpack_head(metadata.numpy().tobytes(), torch.device("cpu"))
        self._exchange([], [(server, object_codec.as_bytes(tensor)) for tensor in tensors])
        return Response(
            reply=Reply(version=0), state=object_codec.unpack(body, tensors, self._trust)
        )

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
        tag = _REQUEST if sends else _RESPONSE
        try:
            self._transport.exchange(sends, recvs, limit, tag)
        except (PeerLostError, TimeLimitError) as error:
            servers = sorted({peer for peer, _ in (*sends, *recvs)})
            raise type(error)(
                f"a parameter server is lost or silent, one of ranks {servers}: {error} Its part "
                "of the parameters is lost: resume from the last checkpoint. A serving rank must "
                "not exit until all ranks have called flush() or left optimizer.join()."
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


def message_buffers(memory: ShardMemory, codec: StripeCodec | None) -> list[Tensor]:
    """The buffers that are sent for a memory: its own, or bytes to encode it in."""
    if codec is None:
        return memory.buffers
    return [
        torch.zeros(codec.stripe_nbytes(layout), dtype=torch.uint8, device="cpu")
        for layout in memory.layouts
    ]


def decoder_of(codec: StripeCodec | None) -> StripeCodec | None:
    """A codec for decoding on another thread: the state of a codec is not thread-safe."""
    if codec is None:
        return None
    decoder = copy.copy((codec.codec if isinstance(codec, ErrorFeedback) else codec).new_instance())
    decoder.nonfinite = NonfiniteTracker()
    return decoder


_ERRORS: dict[str, type[CommunicationError]] = {
    error.__name__: error for error in (TimeLimitError, PeerLostError)
}


def _error_from(server: int, fields: Mapping[str, str]) -> CommunicationError:
    kind = _ERRORS.get(fields["kind"], CommunicationError)
    return kind(f"the server on rank {server} reports: {fields['text']}")


def _write(metadata: dict[str, Any] | bytes) -> Tensor:
    if not metadata:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    raw = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _read(metadata: Tensor) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if metadata.numel():
        fields = json.loads(metadata.numpy().tobytes())
    return fields
