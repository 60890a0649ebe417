"""Holds checkpoints in memory: those of the ranks of this host, and those of the host before it.

Ranks end at every change of an elastic job; the process of their host does not, so it holds what
they would save. A rank hands over the files of a checkpoint, the process forwards them to the next
host of the round, and both report to the rendezvous. Once two hosts hold all files that the
manifest names, older ones are deleted: a host holds files of at most two checkpoints.

Ranks connect to the process of their host through an abstract Unix socket, which accepts only
processes of the same user and leaves no file behind; hosts connect to each other through an
authenticated listener.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.checkpoint_replicas.frames import (
    Announce,
    Done,
    GetFile,
    GetRestored,
    Header,
    Payload,
    PutFile,
    Rejected,
    Reply,
    Restored,
    receive_frame,
    send_frame,
)
from torchmn.control.connection import Channel
from torchmn.control.messages.elastic import (
    CheckpointSaved,
    ElasticMessage,
    FileHeld,
    PeerHello,
    Round,
    StagedCheckpoint,
)
from torchmn.errors import LaunchError

ROLE = "replica server"
"""The role of the listener, see `torchmn.control.authenticated_listener`."""
_MAX_UNFINISHED = 3
"""Per file: ranks do not report a checkpoint that they have abandoned."""
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 10.0


class ReplicaServer:
    """Serves one host's replicas to its ranks and to other hosts, in daemon threads.

    ``post`` reports to the rendezvous which files are held, and which checkpoints are finished.
    """

    def __init__(
        self,
        host: str,
        secret: str,
        listener: socket.socket,
        post: Callable[[ElasticMessage], None],
    ) -> None:
        self._host = host
        self._secret = secret
        self._post = post
        self._held: dict[tuple[StagedCheckpoint, str], tuple[FileHeld, Payload]] = {}
        self._complete = StagedCheckpoint(0, -1, "")
        self._lock = threading.Lock()
        self._round: Round | None = None
        self._next: socket.socket | None = None  # to the next host of the round
        self._next_lock = threading.Lock()
        self.name = f"torchmn-{os.getpid()}-{secrets.token_hex(8)}"
        self._unix_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix_listener.bind(f"\0{self.name}")
        self._unix_listener.listen(256)
        self._listener = AuthenticatedListener(listener, secret=secret, role=ROLE)
        self._is_closed = False
        self._threads = [
            threading.Thread(target=work, name="replicas", daemon=True)
            for work in (self._serve_ranks, self._serve_hosts)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._is_closed = True
        self._unix_listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def held(self) -> list[FileHeld]:
        """The files that are held now."""
        with self._lock:
            return [held for held, _ in self._held.values()]

    def begin(self, found: Round) -> None:
        """Begin a round: only the checkpoint that it continues from is kept."""
        with self._next_lock:
            if self._next is not None:
                self._next.close()
            self._next = None
        with self._lock:
            self._round = found
            self._held = {key: each for key, each in self._held.items() if key[0] == found.restored}

    def prune_older(self, checkpoint: StagedCheckpoint) -> None:
        """Delete what is older than this checkpoint, which is complete."""
        with self._lock:
            self._complete = checkpoint
            self._held = {key: each for key, each in self._held.items() if key[0] >= checkpoint}

    # ---- connections --------------------------------------------------------------------------

    def _serve_ranks(self) -> None:
        while True:
            try:
                connection, _ = self._unix_listener.accept()
            except OSError:
                self._unix_listener.close()
                return
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(peer)
            if uid != os.getuid():
                connection.close()
                continue
            self._serve(connection, is_rank=True)

    def _serve_hosts(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                selector.select(0.5)
                for channel, identity in self._listener.admit():
                    if isinstance(identity, PeerHello):
                        self._serve(_blocking(channel), is_rank=False)
                    else:
                        channel.close()
        self._listener.close()
        with self._next_lock:
            if self._next is not None:
                self._next.close()

    def _serve(self, connection: socket.socket, *, is_rank: bool) -> None:
        threading.Thread(
            target=self._reply_to_all, args=(connection, is_rank), name="replicas", daemon=True
        ).start()

    def _reply_to_all(self, connection: socket.socket, is_rank: bool) -> None:
        """Reply to one client, frame by frame, until it disconnects."""
        with connection, suppress(OSError, ValueError):
            while (frame := receive_frame(connection)) is not None:
                try:
                    reply, part = self._reply(*frame, is_rank)
                except LaunchError as error:
                    reply, part = Rejected(reason=str(error)), None
                send_frame(connection, reply, () if part is None else (part,))

    # ---- requests -----------------------------------------------------------------------------

    def _reply(
        self, request: Header, payload: Payload, is_rank: bool
    ) -> tuple[Reply, Payload | None]:
        if isinstance(request, PutFile):
            return self._put(request, payload, is_rank), None
        if isinstance(request, GetFile):
            return Done(), self._get(request) if is_rank else self._own(request)
        if isinstance(request, GetRestored):
            return Restored(checkpoint=self._round.restored if self._round else None), None
        if isinstance(request, Announce):
            self._post(CheckpointSaved(step=request.step))
            return Done(), None
        raise LaunchError(f"{type(request).__name__} is not a request.")

    def _put(self, request: PutFile, payload: Payload, is_rank: bool) -> Done:
        checkpoint, file = request.checkpoint, request.file
        held = FileHeld(checkpoint=checkpoint, file=file, needs=request.needs)
        with self._lock:
            now = self._round.number if self._round else 0
            if checkpoint.round != now and is_rank:
                raise LaunchError(f"Round {checkpoint.round} is over, this is round {now}.")
            self._held[checkpoint, file] = held, payload
            same = sorted(key for key in self._held if key[1] == file and key[0] != self._complete)
            for key in same[:-_MAX_UNFINISHED]:
                del self._held[key]
        self._post(held)
        return Done(is_held_twice=is_rank and self._forward(request, payload))

    def _forward(self, request: PutFile, payload: Payload) -> bool:
        """Send a file to the next host of the round. Returns whether it holds the file now."""
        with self._next_lock:
            try:
                connection = self._next or self._connect_next()
                if connection is None:
                    return False
                self._next = connection
                send_frame(connection, request, (payload,))
                frame = receive_frame(connection)
                return frame is not None and isinstance(frame[0], Done)
            except (OSError, ValueError, LaunchError):
                if self._next is not None:
                    self._next.close()
                self._next = None  # the rendezvous notices if that host is gone
                return False

    def _connect_next(self) -> socket.socket | None:
        found = self._round
        if found is None or len(found.members) < 2:
            return None
        names = [member.host for member in found.members]
        index = (names.index(self._host) + 1) % len(names)
        return self._connect(found, index)

    def _get(self, request: GetFile) -> Payload:
        """A file for a rank, from here or from a host that holds it. Raises LaunchError."""
        with self._lock:
            own, found = self._held.get((request.checkpoint, request.file)), self._round
        if own is not None:
            return own[1]
        step = request.checkpoint.step
        if found is None or request.checkpoint != found.restored:
            raise LaunchError(f"This round does not continue from the replicas of step {step}.")
        for index in found.holders.get(request.file, []):
            with suppress(OSError, ValueError, LaunchError):
                with self._connect(found, index) as connection:
                    send_frame(connection, request)
                    frame = receive_frame(connection)
                if frame is not None and isinstance(frame[0], Done):
                    return frame[1]
        raise LaunchError(f"No host holds {request.file} of step {step} in memory.")

    def _own(self, request: GetFile) -> Payload:
        with self._lock:
            held = self._held.get((request.checkpoint, request.file))
        if held is None:
            raise LaunchError(f"{self._host} does not hold {request.file} of {request.checkpoint}.")
        return held[1]

    def _connect(self, found: Round, index: int) -> socket.socket:
        member = found.members[index]
        return _blocking(
            connect_authenticated(
                f"{member.address}:{member.replica_port}",
                secret=self._secret,
                role=ROLE,
                identity=PeerHello(host=self._host),
                limit_s=_CONNECT_S,
            )
        )


def _blocking(channel: Channel) -> socket.socket:
    """The connection of a channel on which nothing was sent yet, for bytes, blocking."""
    connection = socket.socket(fileno=os.dup(channel.fileno()))
    channel.close()
    connection.setblocking(True)
    return connection
