"""Copies of what the ranks would save, in the memory of their own host and of the next one.

Workers die at every change, the process of their host does not: so it holds the copies. A rank
hands the files of a checkpoint over, the process sends them on to the next host of the round, and
the rendezvous hears from both. When all files that the manifest names are held twice, older ones
are forgotten. So a host holds up to two checkpoints' files of its own ranks and of those of the
host before it.

Workers reach their host's process through an abstract socket, which only processes of the same
user may use and which leaves no file behind; hosts reach each other through a gate.
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
from torchmn.control.checkpoint_replicas.frames import Header, Payload, receive_frame, send_frame
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

ROLE = "copies"
"""Whose gate it is, see `torchmn.control.authenticated_listener`."""
SOCKET_VARIABLE = "TORCHMN_COPIES"
ROUND_VARIABLE = "TORCHMN_ROUND"
_MOST_DRAFTS = 3
"""Of one file at a time. Some may have been given up by their ranks, who do not say so."""
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 10.0


class ReplicaServer:
    """Serves the copies of one host to its workers and to other hosts, in daemon threads.

    ``post`` tells the rendezvous what is held, and what the leader's checkpointer announces.
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
        self._kept: StagedCheckpoint = (0, -1, "")
        self._lock = threading.Lock()
        self._round: Round | None = None
        self._next: socket.socket | None = None  # to the next host of the round
        self._next_lock = threading.Lock()
        self.name = f"torchmn-{os.getpid()}-{secrets.token_hex(8)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"\0{self.name}")
        self._door.listen(256)
        self._gate = AuthenticatedListener(listener, secret=secret, role=ROLE)
        self._is_closed = False
        self._threads = [
            threading.Thread(target=work, name="copies", daemon=True)
            for work in (self._serve_workers, self._serve_hosts)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Serve nobody any more."""
        self._is_closed = True
        self._door.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def held(self) -> list[FileHeld]:
        """What is held now."""
        with self._lock:
            return [stored for stored, _ in self._held.values()]

    def begin(self, found: Round) -> None:
        """A round starts: only what it may be restored from is of use any more."""
        with self._next_lock:
            if self._next is not None:
                self._next.close()
            self._next = None
        with self._lock:
            self._round = found
            kept = _draft_of(found)
            self._held = {key: each for key, each in self._held.items() if key[0] == kept}

    def keep(self, draft: StagedCheckpoint) -> None:
        """This checkpoint is complete: drop what is older."""
        with self._lock:
            self._kept = draft
            self._held = {key: each for key, each in self._held.items() if key[0] >= draft}

    # ---- who comes ----------------------------------------------------------------------------

    def _serve_workers(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                self._door.close()
                return
            words = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(words)
            if uid != os.getuid():
                connection.close()
                continue
            self._attend(connection, is_worker=True)

    def _serve_hosts(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._gate, selectors.EVENT_READ)
            while not self._is_closed:
                selector.select(0.5)
                for channel, identity in self._gate.admit():
                    if isinstance(identity, PeerHello):
                        self._attend(_bare(channel), is_worker=False)
                    else:
                        channel.close()
        self._gate.close()
        with self._next_lock:
            if self._next is not None:
                self._next.close()

    def _attend(self, connection: socket.socket, *, is_worker: bool) -> None:
        threading.Thread(
            target=self._converse, args=(connection, is_worker), name="copies", daemon=True
        ).start()

    def _converse(self, connection: socket.socket, is_worker: bool) -> None:
        """Answer one visitor, frame by frame, until it leaves."""
        with connection, suppress(OSError, ValueError):
            while (frame := receive_frame(connection)) is not None:
                header, payload = frame
                try:
                    answer, part = self._answer(header, payload, is_worker)
                except (KeyError, TypeError, LaunchError) as error:
                    answer, part = {"problem": str(error)}, None
                send_frame(connection, answer, () if part is None else (part,))

    # ---- what they want -----------------------------------------------------------------------

    def _answer(
        self, header: Header, payload: Payload, is_worker: bool
    ) -> tuple[Header, Payload | None]:
        wish = header["wish"]
        if wish == "put":
            return self._put(header, payload, is_worker), None
        if wish == "get":
            draft, file = _named(header)
            return {}, self._get(draft, file) if is_worker else self._own(draft, file)
        if wish == "restored":
            found = self._round
            return {"restored": [] if found is None else found.restored}, None
        if wish == "announce":
            self._post(CheckpointSaved(step=int(str(header["step"]))))
            return {}, None
        raise LaunchError(f"Nobody here knows the wish {wish!r}.")

    def _put(self, header: Header, payload: Payload, is_worker: bool) -> Header:
        draft, file = _named(header)
        needs = header["needs"]
        stored = FileHeld(
            round=draft[0],
            step=draft[1],
            draft=draft[2],
            file=file,
            needs=[str(name) for name in needs] if isinstance(needs, list) else [],
        )
        with self._lock:
            now = self._round.number if self._round else 0
            if draft[0] != now and is_worker:
                raise LaunchError(f"Round {draft[0]} is over, this is round {now}.")
            self._held[draft, file] = stored, payload
            same = sorted(key for key in self._held if key[1] == file and key[0] != self._kept)
            for key in same[:-_MOST_DRAFTS]:
                del self._held[key]
        self._post(stored)
        return {"is_held_twice": is_worker and self._send_on(header, payload)}

    def _send_on(self, header: Header, payload: Payload) -> bool:
        """Give the next host of the round a copy. Whether it has it now."""
        with self._next_lock:
            try:
                connection = self._next or self._connect_next()
                if connection is None:
                    return False
                self._next = connection
                send_frame(connection, header, (payload,))
                answer = receive_frame(connection)
                return answer is not None and "problem" not in answer[0]
            except (OSError, ValueError, LaunchError):
                if self._next is not None:
                    self._next.close()
                self._next = None  # the rendezvous will notice if that host is gone
                return False

    def _connect_next(self) -> socket.socket | None:
        found = self._round
        if found is None or len(found.members) < 2:
            return None
        names = [member["host"] for member in found.members]
        index = (names.index(self._host) + 1) % len(names)
        return self._connect(found, index)

    def _get(self, draft: StagedCheckpoint, file: str) -> Payload:
        """A file for a worker, from here or from a host that holds it. Raises LaunchError."""
        with self._lock:
            own, found = self._held.get((draft, file)), self._round
        if own is not None:
            return own[1]
        if found is None or draft != _draft_of(found):
            raise LaunchError(f"This round does not go on from the copies of step {draft[1]}.")
        name: Header = {"wish": "get", "draft": list(draft), "file": file}
        for index in found.holders.get(file, []):
            with suppress(OSError, ValueError, LaunchError):
                with self._connect(found, index) as connection:
                    send_frame(connection, name)
                    answer = receive_frame(connection)
                if answer is not None and "problem" not in answer[0]:
                    return answer[1]
        raise LaunchError(f"Nobody holds {file} of step {draft[1]} in memory any more.")

    def _own(self, draft: StagedCheckpoint, file: str) -> Payload:
        with self._lock:
            if (draft, file) not in self._held:
                raise LaunchError(f"{self._host} does not hold {file} of {draft}.")
            return self._held[draft, file][1]

    def _connect(self, found: Round, index: int) -> socket.socket:
        member = found.members[index]
        return _bare(
            connect_authenticated(
                f"{member['address']}:{member['copies_port']}",
                secret=self._secret,
                role=ROLE,
                identity=PeerHello(host=self._host),
                limit_s=_CONNECT_S,
            )
        )


def _named(header: Header) -> tuple[StagedCheckpoint, str]:
    words, file = header["draft"], header["file"]
    if not isinstance(words, list) or len(words) != 3 or not isinstance(file, str):
        raise LaunchError(f"A file is named by round, step, draft and file, got {words!r}.")
    return (int(words[0]), int(words[1]), str(words[2])), file


def _draft_of(found: Round) -> StagedCheckpoint | None:
    """What a round goes on from, if it is held in memory."""
    if len(found.restored) != 3:
        return None
    number, step, name = found.restored
    return int(number), int(step), str(name)


def _bare(channel: Channel) -> socket.socket:
    """The connection of a channel on which nothing has been said yet, for bytes, blocking."""
    connection = socket.socket(fileno=os.dup(channel.fileno()))
    channel.close()
    connection.setblocking(True)
    return connection
