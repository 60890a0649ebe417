"""Requests of workers to servers, over a transport that nothing else uses.

A worker sends a request to each server and gets one response. Both consist of a kind, an object,
and gradients or parameters, for which both sides have memory. A server that cannot answer yet sends
a "wait" every quarter of the time limit, so that a worker can tell a server that waits for slow
workers from a dead one. Requests have one tag, responses another. A server has a thread for each
worker on another rank; its own rank calls it directly, on the thread of an engine.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, PeerLostError, TimeLimitError, TorchmnError
from torchmn.comm import object_codec
from torchmn.comm.codecs import StripeCodec
from torchmn.comm.engine import Engine
from torchmn.comm.transports.base import BackoffTimeLimit, TimeLimit, Transport
from torchmn.exchange.schedules.parameter_server.server import ShardServer
from torchmn.exchange.schedules.parameter_server.shards import (
    SentGradients,
    ShardMemory,
    decoder_of,
)

_REQUEST, _RESPONSE = 1, 2
_YEAR_S = 365 * 86400.0
# The longest pause between polls, for transports that poll; times the number of threads.
_PAUSE_S = 0.001
_WITH_PARAMETERS = ("push", "skip", "finish")  # requests whose response has the parameters
_ERRORS = {"TimeLimitError": TimeLimitError, "PeerLostError": PeerLostError}
# A kind, an object, and buffers; the receiver knows their sizes from the kind.
Message = tuple[str, Any, Sequence[Tensor]]


@dataclass(frozen=True)
class Messages:
    """Messages to and from other ranks.

    Several threads may use it at the same time, if each talks to ranks of its own.
    """

    transport: Transport
    timeout_s: float
    trust: object_codec.Trust

    def send(self, tag: int, messages: Mapping[int, Message], limit_s: float | None = None) -> None:
        """Send one message to each rank in ``messages``. Local."""
        sends = []
        for peer, (kind, content, buffers) in messages.items():
            packed = object_codec.pack(content, self.trust, note=kind)
            head = torch.frombuffer(bytearray(packed.head), dtype=torch.uint8)
            size = torch.tensor([head.numel()], device="cpu")
            sends += [(peer, each) for each in (size, head, *packed.buffers, *buffers)]
        self.transport.exchange(sends, [], self._limit(limit_s), tag)

    def receive(
        self,
        tag: int,
        peers: Collection[int],
        buffers: Callable[[int, str], Sequence[Tensor]],
        first: TimeLimit,
    ) -> dict[int, tuple[str, Any]]:
        """Wait for one message from each of ``peers``; returns its kind and object by rank. Local.

        ``buffers(peer, kind)`` returns the memory for the buffers that follow. ``first`` limits the
        wait for the message to begin.
        """
        exchange, host = self.transport.exchange, torch.device("cpu")
        sizes = {peer: torch.zeros(1, dtype=torch.int64, device=host) for peer in peers}
        exchange([], list(sizes.items()), first, tag)
        heads = {p: torch.empty(int(n), dtype=torch.uint8, device=host) for p, n in sizes.items()}
        exchange([], list(heads.items()), self._limit(), tag)
        described = {
            peer: object_codec.unpack_head(head.numpy().tobytes(), host)
            for peer, head in heads.items()
        }
        recvs = []
        for peer, (kind, _, tensors) in described.items():
            recvs += [(peer, object_codec.as_bytes(tensor)) for tensor in tensors]
            recvs += [(peer, buffer) for buffer in buffers(peer, kind)]
        exchange([], recvs, self._limit(), tag)
        return {
            peer: (kind, object_codec.unpack(body, tensors, self.trust))
            for peer, (kind, body, tensors) in described.items()
        }

    def _limit(self, seconds: float | None = None) -> TimeLimit:
        return TimeLimit(self.timeout_s if seconds is None else seconds, lambda: False)


class WorkerThread(threading.Thread):
    """The server's end: serves one worker of another rank until it leaves or is lost."""

    def __init__(
        self, server: ShardServer, worker: int, messages: Messages, codec: StripeCodec | None
    ) -> None:
        super().__init__(name=f"torchmn-server{server.rank}-for{worker}", daemon=True)
        self._server, self._worker, self._messages = server, worker, messages
        self._memory = ShardMemory(server.parameters)
        self._gradients = SentGradients(self._memory, decoder_of(codec))
        # If the transport polls, every thread of this rank does: the pause grows with their number.
        self._pause_s = _PAUSE_S * messages.transport.size
        self._limit: TimeLimit | None = None
        self._is_ended = False

    def run(self) -> None:
        """See `threading.Thread.run`."""
        server, worker = self._server, self._worker
        try:
            while True:
                kind, fields = self._receive()
                if kind == "leave":
                    server.leave(worker)
                    return
                try:
                    stay = partial(self._send, "wait")
                    answer = server.answer(kind, worker, fields, self._memory, stay)
                except TorchmnError as error:
                    self._send("error", [type(error).__name__, str(error)])
                else:
                    is_pulled = kind in _WITH_PARAMETERS
                    self._send("result", answer, self._memory.buffers if is_pulled else ())
        except TorchmnError as error:
            server.leave(worker, str(error))
        except BaseException as error:  # such as one of torch: no worker may be left waiting
            failure = server.fail(error)
            with suppress(Exception):  # the connection may be what failed
                self._send("error", [type(failure).__name__, str(failure)])

    def end(self) -> None:
        """Make the thread end instead of waiting for a request. Called from another thread."""
        self._is_ended = True
        if self._limit is not None:
            self._limit.end()

    def _send(self, kind: str, content: Any = None, buffers: Sequence[Tensor] = ()) -> None:
        self._messages.send(_RESPONSE, {self._worker: (kind, content, buffers)})

    def _receive(self) -> tuple[str, Any]:
        # Practically no limit: a worker may compute for long between two requests.
        self._limit = BackoffTimeLimit(_YEAR_S, self._pause_s)
        if self._is_ended:  # `end` may have been called before this limit was set
            self._limit.end()
        received = self._messages.receive(
            _REQUEST,
            [self._worker],
            lambda _, kind: self._gradients.buffers if kind == "push" else (),
            self._limit,
        )
        kind, fields = received[self._worker]
        if kind == "push":
            self._gradients.decode()
        return kind, fields


class ServerClient:
    """The worker's end of the connections to all servers. Used by one thread at a time.

    ``memory[server]`` holds the gradients of a push, then the parameters of the response.
    ``own_server`` is the server of this rank, None if it has none.
    """

    def __init__(
        self,
        messages: Messages,
        memory: Mapping[int, ShardMemory],
        own_server: ShardServer | None,
        codec: StripeCodec | None,
        rank: int,
        rank_label: str,
    ) -> None:
        self._messages, self._memory, self._own_server = messages, memory, own_server
        self._codec, self._rank, self._rank_label = codec, rank, rank_label
        self._own_engine = Engine(torch.device("cpu"))
        self._outgoing = {s: SentGradients(m, codec) for s, m in memory.items() if s != rank}
        self._broken: CommunicationError | None = None

    def encode(self) -> list[str]:
        """Encode the gradients for servers on other ranks.

        Returns the names of parameters whose gradients are out of the codec's range.
        """
        codec = self._codec
        if codec is None:
            return []
        for outgoing in self._outgoing.values():
            outgoing.encode()
        names = codec.nonfinite.names("encoding")
        codec.finish(is_valid=not names)
        return names

    def request(self, kind: str, fields: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Send a request to all servers and return their answers by rank: a `Reply`, or the state.

        Raises PeerLostError, TimeLimitError: a server is lost or silent, or reports that a worker
        is.
        """
        if self._broken is not None:
            raise CommunicationError(
                f"The servers cannot be used since an exchange failed: {self._broken}"
            ) from self._broken
        try:
            return self._request(kind, fields)
        except CommunicationError as error:
            # Responses to this request may still arrive: the next one would take them for its own.
            self._broken = type(error)(f"{self._rank_label}: {error}")
            raise self._broken from error

    def _request(self, kind: str, fields: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        own, rank = self._own_server, self._rank
        answers: dict[int, Any] = {}
        work = None
        # At the same time as the requests below: if workers asked one server after another, they
        # could wait for each other in a circle.
        if own is not None:
            request = (kind, rank, fields[rank], self._memory[rank], lambda: None)
            work = self._own_engine.submit(partial(own.answer, *request))
        for server, what, answer in self._responses(kind, fields, answers):
            if what == "error":
                cls = _ERRORS.get(answer[0], CommunicationError)
                raise cls(f"the server on rank {server} reports: {answer[1]}")
            if what == "result":
                answers[server] = answer
        if work is not None:
            while not work.is_done_within(1.0):  # the server itself has a time limit
                pass
            answers[rank] = work.wait()
        return answers

    def _responses(
        self, kind: str, fields: Mapping[int, dict[str, Any]], answers: Mapping[int, Any]
    ) -> Iterator[tuple[int, str, Any]]:
        """Send a request to servers on other ranks, and yield responses.

        Yields the server, the kind and the object of each response until the caller has put the
        results of all servers into ``answers``.
        """
        messages, outgoing, memory = self._messages, self._outgoing, self._memory
        # The rank may be the only server, whom it calls without a message.
        if not outgoing:
            return
        is_push, is_pull = kind == "push", kind in _WITH_PARAMETERS
        try:
            sent = {s: (kind, fields[s], o.buffers if is_push else ()) for s, o in outgoing.items()}
            messages.send(_REQUEST, sent)
            while waiting := outgoing.keys() - answers.keys():
                received = messages.receive(
                    _RESPONSE,
                    waiting,
                    lambda s, what: memory[s].buffers if is_pull and what == "result" else (),
                    BackoffTimeLimit(messages.timeout_s, _PAUSE_S),
                )
                for server, (what, answer) in received.items():
                    yield server, what, answer
        except (PeerLostError, TimeLimitError) as error:
            raise type(error)(
                f"a parameter server is lost or silent, one of ranks {sorted(outgoing)}: {error} "
                "Its part of the parameters is lost: resume from the last checkpoint. A serving "
                "rank must not exit until all ranks have called flush() or left optimizer.join()."
            ) from error

    def leave(self, limit_s: float) -> None:
        """Tell all servers that this worker leaves. Local; servers that are lost are ignored."""
        if self._own_server is not None:
            self._own_server.leave(self._rank)
        if self._broken is not None:
            return
        for server in self._outgoing:
            with suppress(CommunicationError):
                self._messages.send(_REQUEST, {server: ("leave", None, ())}, limit_s)

    def close(self) -> None:
        """End the thread that calls this rank's own server, which is closed."""
        self._own_engine.close()
