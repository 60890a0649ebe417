"""What a rank of an elastic job says to the process that holds its host's copies in memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

from torchmn.control.checkpoint_replicas.frames import (
    Buffer,
    Header,
    Payload,
    receive_frame,
    send_frame,
)
from torchmn.control.checkpoint_replicas.server import ROUND_VARIABLE, SOCKET_VARIABLE
from torchmn.control.messages.elastic import StagedCheckpoint
from torchmn.errors import LaunchError


class ReplicaClient:
    """A rank's connection to the process of its host, which outlives the rank. Local.

    Any thread. Raises LaunchError from every method: that process is gone, or refused.
    """

    def __init__(self, name: str, number: int) -> None:
        self._round = number
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"The process that holds copies on {socket.gethostname()} does not answer: {error}."
            ) from None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> ReplicaClient | None:
        """The connection of a rank that `torchmn run --elastic` started; else ``None``."""
        name, number = env.get(SOCKET_VARIABLE), env.get(ROUND_VARIABLE)
        return cls(name, int(number)) if name and number else None

    def restored(self) -> StagedCheckpoint | None:
        """What this round goes on from if it is held in memory; the same on all ranks."""
        answer, _ = self._ask({"wish": "restored"})
        found = answer["restored"]
        if not isinstance(found, list) or len(found) != 3:
            return None
        return int(found[0]), int(found[1]), str(found[2])

    def get(self, draft: StagedCheckpoint, file: str) -> Payload:
        """A file that a rank has put, from this host or another one."""
        _, payload = self._ask({"wish": "get", "draft": list(draft), "file": file})
        return payload

    def put(
        self,
        step: int,
        draft: str,
        file: str,
        parts: Sequence[Buffer],
        *,
        needs: Sequence[str] = (),
    ) -> bool:
        """Hand over the bytes of a file. Whether the next host has them now, too.

        ``needs`` names all files of the checkpoint, which is complete when they all are held: given
        with the last one. The buffers are of use again when this returns.
        """
        words: Header = {
            "wish": "put",
            "draft": [self._round, step, draft],
            "file": file,
            "needs": list(needs),
        }
        answer, _ = self._ask(words, parts)
        return bool(answer["is_held_twice"])

    def announce(self, step: int) -> None:
        """Leader: the checkpoint of this step is finished, so hosts that wait may enter."""
        self._ask({"wish": "announce", "step": step})

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _ask(self, header: Header, parts: Sequence[Buffer] = ()) -> tuple[Header, Payload]:
        try:
            with self._lock:
                send_frame(self._socket, header, parts)
                answer = receive_frame(self._socket)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"The process that holds copies on {socket.gethostname()} is gone: {error}."
            ) from None
        if answer is None:
            raise LaunchError(f"The process that holds copies on {socket.gethostname()} hung up.")
        if "problem" in answer[0]:
            raise LaunchError(f"A copy in memory was refused: {answer[0]['problem']}")
        return answer
