"""A rank's connection to the process that holds checkpoint replicas on its host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

from torchmn.control.checkpoint_replicas.frames import (
    Announce,
    Buffer,
    Done,
    GetFile,
    GetRestored,
    Payload,
    PutFile,
    Rejected,
    Request,
    Restored,
    receive_frame,
    send_frame,
)
from torchmn.control.messages.elastic import StagedCheckpoint
from torchmn.environment_variables import REPLICA_SOCKET_VARIABLE, ROUND_VARIABLE
from torchmn.errors import LaunchError


class ReplicaClient:
    """A rank's connection to the replica server of its host, which outlives the rank. Local.

    Thread-safe. Every method raises LaunchError: the server is gone, or rejected the request.
    """

    def __init__(self, name: str, number: int) -> None:
        self._round = number
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise self._gone(str(error)) from None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> ReplicaClient | None:
        """The connection of a rank that `torchmn run --elastic` started; else ``None``."""
        name, number = env.get(REPLICA_SOCKET_VARIABLE), env.get(ROUND_VARIABLE)
        return cls(name, int(number)) if name and number else None

    def restored(self) -> StagedCheckpoint | None:
        """The checkpoint in memory that this round continues from; the same on all ranks."""
        reply, _ = self._call(GetRestored())
        return reply.checkpoint if isinstance(reply, Restored) else None

    def get(self, checkpoint: StagedCheckpoint, file: str) -> Payload:
        """The bytes of a file that a rank has put, from this host or another one."""
        return self._call(GetFile(checkpoint=checkpoint, file=file))[1]

    def put(
        self,
        step: int,
        name: str,
        file: str,
        parts: Sequence[Buffer],
        *,
        needs: Sequence[str] = (),
    ) -> bool:
        """Hand over the bytes of a file. Returns whether the next host holds them now, too.

        ``needs`` names all files of the checkpoint, and is given with the last one. The buffers may
        be reused when this returns.
        """
        checkpoint = StagedCheckpoint(self._round, step, name)
        request = PutFile(checkpoint=checkpoint, file=file, needs=tuple(needs))
        reply, _ = self._call(request, parts)
        return isinstance(reply, Done) and reply.is_held_twice

    def announce(self, step: int) -> None:
        """Leader: the checkpoint of this step is finished, so that waiting hosts may join."""
        self._call(Announce(step=step))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _call(
        self, request: Request, parts: Sequence[Buffer] = ()
    ) -> tuple[Restored | Done, Payload]:
        try:
            with self._lock:
                send_frame(self._socket, request, parts)
                frame = receive_frame(self._socket)
        except (OSError, ValueError) as error:
            raise self._gone(str(error)) from None
        if frame is None:
            raise self._gone("it closed the connection")
        reply, payload = frame
        if isinstance(reply, Rejected):
            raise LaunchError(f"The replica server rejected a request: {reply.reason}")
        if not isinstance(reply, Restored | Done):
            raise self._gone(f"it sent {type(reply).__name__}")
        return reply, payload

    def _gone(self, reason: str) -> LaunchError:
        return LaunchError(
            f"The process that holds checkpoint replicas on {socket.gethostname()} does not "
            f"answer: {reason}."
        )
