"""Requests of workers to servers, over a transport that nothing else uses.

A worker sends a request to each server and gets one response. Both consist of a kind and an object,
which holds the gradients or parameters. A server that cannot answer yet sends a "wait" every
quarter of the time limit, so that a worker can tell a server that waits for slow workers from a
dead one. Requests have one tag, responses another. A server has a thread for each worker on another
rank; its own rank calls it directly.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import CommunicationError, PeerLostError, TimeLimitError, TorchmnError
from torchmn.comm import object_codec
from torchmn.comm.point_to_point import ENVELOPE_BYTES, new_bytes, opened, sealed
from torchmn.comm.transports.base import (
    BackoffTimeLimit,
    TimeLimit,
    Transport,
    abort_pending_receives,
)
from torchmn.exchange.schedules.parameter_server.server import ShardServer

_REQUEST, _RESPONSE = 1, 2
_YEAR_S = 365 * 86400.0
# The longest pause between polls, for transports that poll; times the number of threads.
_PAUSE_S = 0.001
_ERRORS = {"TimeLimitError": TimeLimitError, "PeerLostError": PeerLostError}


class Messages:
    """Messages to and from other ranks. All methods are local.

    Several threads may use it at the same time, if each has a peer or a tag of its own.
    """

    def __init__(self, transport: Transport, timeout_s: float, trust: object_codec.Trust) -> None:
        self.transport, self.timeout_s, self._trust = transport, timeout_s, trust
        # The limits of waits for messages to begin, by peer and tag.
        self._waits: dict[tuple[int, int], TimeLimit] = {}
        self._is_ended = False

    def send(self, peer: int, tag: int, kind: str, content: Any = None) -> None:
        """Send a kind and an object."""
        packed = object_codec.pack(content, self._trust, note=kind)
        parts = [*sealed(packed.head), *packed.buffers]
        self.transport.exchange([(peer, part) for part in parts], [], self._limit(), tag)

    def receive(self, peer: int, tag: int, wait_s: float) -> tuple[str, Any]:
        """Wait for a message, which must begin within ``wait_s``; return its kind and object."""

        def receive(*parts: Tensor) -> None:
            self.transport.exchange([], [(peer, part) for part in parts], self._limit(), tag)

        # If the transport polls, all threads of this rank do: pauses grow with their number.
        wait = BackoffTimeLimit(wait_s, _PAUSE_S * self.transport.size)
        self._waits[peer, tag] = wait
        if self._is_ended:  # `end` may have been called before this limit was set
            wait.end()
        envelope = new_bytes(ENVELOPE_BYTES)
        self.transport.exchange([], [(peer, envelope)], wait, tag)
        _, head = opened(envelope, receive)
        kind, body, tensors = object_codec.unpack_head(head, torch.device("cpu"))
        receive(*map(object_codec.as_bytes, tensors))
        return kind, object_codec.unpack(body, tensors, self._trust)

    def end(self) -> None:
        """Make all waits of other threads for a message raise, now and later."""
        self._is_ended = True
        for wait in [*self._waits.values()]:
            wait.end()
        abort_pending_receives(self.transport)

    def _limit(self) -> TimeLimit:
        return TimeLimit(self.timeout_s, lambda: False)


class WorkerThread(threading.Thread):
    """The server's end: serves one worker of another rank until it leaves or is lost."""

    def __init__(self, server: ShardServer, worker: int, messages: Messages) -> None:
        super().__init__(name=f"torchmn-server{server.rank}-for{worker}", daemon=True)
        self._server, self._worker, self._messages = server, worker, messages

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
                    answer = server.answer(kind, worker, fields, partial(self._send, "wait"))
                except TorchmnError as error:
                    self._send("error", [type(error).__name__, str(error)])
                else:
                    self._send("result", answer)
        except TorchmnError:
            server.leave(worker, is_lost=True)
        except BaseException as error:  # such as one of torch: no worker may be left waiting
            failure = server.fail(error)
            with suppress(Exception):  # the connection may be what failed
                self._send("error", [type(failure).__name__, str(failure)])

    def _send(self, kind: str, content: Any = None) -> None:
        self._messages.send(self._worker, _RESPONSE, kind, content)

    def _receive(self) -> tuple[str, Any]:
        # Practically no limit: a worker may compute for long between two requests.
        return self._messages.receive(self._worker, _REQUEST, _YEAR_S)


class ServerClient:
    """The worker's end of the connections to all servers. Used by one thread at a time.

    ``servers`` are the ranks that serve, and ``own_server`` is the server of this rank, None if it
    has none.
    """

    def __init__(
        self,
        messages: Messages,
        servers: Sequence[int],
        own_server: ShardServer | None,
        rank: int,
        rank_label: str,
    ) -> None:
        self._messages, self._own_server = messages, own_server
        self._rank, self._rank_label = rank, rank_label
        self._others = [server for server in servers if server != rank]
        self._broken: CommunicationError | None = None
        self.threads: list[threading.Thread] = []
        """Threads of a request that is under way, or was ended by an error: one for each server on
        another rank."""

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
        arrived: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def ask(server: int) -> None:
            try:
                arrived.put((server, self._ask(server, kind, fields[server])))
            except BaseException as error:  # raised below
                arrived.put((server, error))

        # At the same time: if workers asked one server after another, they could wait for each
        # other in a circle.
        self.threads = [
            threading.Thread(target=ask, args=(server,), daemon=True) for server in self._others
        ]
        for thread in self.threads:
            thread.start()
        own, rank, answers = self._own_server, self._rank, {}
        if own is not None:
            answers[rank] = own.answer(kind, rank, fields[rank], lambda: None)
        for _ in self.threads:
            server, answer = arrived.get()
            if isinstance(answer, BaseException):
                raise answer
            answers[server] = answer
        self.threads = []
        return answers

    def _ask(self, server: int, kind: str, fields: dict[str, Any]) -> Any:
        """Send a request to a server on another rank, and return its answer."""
        messages, what = self._messages, "wait"
        try:
            messages.send(server, _REQUEST, kind, fields)
            while what == "wait":
                what, answer = messages.receive(server, _RESPONSE, messages.timeout_s)
        except (PeerLostError, TimeLimitError) as error:
            raise type(error)(
                f"the parameter server on rank {server} is lost or silent: {error} "
                "Its part of the parameters is lost: resume from the last checkpoint. A serving "
                "rank must not exit until all ranks have called flush() or left optimizer.join()."
            ) from error
        if what == "error":
            cls = _ERRORS.get(answer[0], CommunicationError)
            raise cls(f"the server on rank {server} reports: {answer[1]}")
        return answer

    @property
    def is_waiting(self) -> bool:
        """Whether an error ended a request before all responses to it have arrived."""
        return any(thread.is_alive() for thread in self.threads)

    def leave(self) -> None:
        """Tell all servers that this worker leaves. Local; servers that are lost are ignored."""
        if self._own_server is not None:
            self._own_server.leave(self._rank)
        if self._broken is not None:
            return
        for server in self._others:
            with suppress(CommunicationError):
                self._messages.send(server, _REQUEST, "leave")
