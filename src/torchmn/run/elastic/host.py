"""A host's connection to the rendezvous server."""

import hashlib
import hmac
import os
import selectors
import signal
import threading

from torchmn.base.errors import LaunchError
from torchmn.control.connection import Channel
from torchmn.control.heartbeat import answer
from torchmn.control.messages import (
    ElasticMessage,
    HeartbeatRequest,
    HostFinished,
    HostReady,
    Message,
    Restart,
    Round,
    Shutdown,
)

_POLL_S = 0.2


def round_secret(secret: str, number: int) -> str:
    """The secret of a round's ranks: those of an earlier round cannot authenticate to this one."""
    return hmac.new(secret.encode(), f"round {number}".encode(), hashlib.sha256).hexdigest()


class Host:
    """Listens to the rendezvous in a thread, for the main thread, which runs torch's agent.

    When the rendezvous requests it or is lost, or ``stdin`` ends since the launcher
    died, the ranks are ended: the process sends itself a signal, which torch's agent passes on to
    them.
    """

    def __init__(self, channel: Channel, *, stdin: int) -> None:
        self._channel = channel
        self._stdin = stdin
        self._lock = threading.Lock()  # of the channel
        self._changed = threading.Condition()
        self._round: Round | None = None
        self._must_restart = False
        self._leave: Shutdown | None = None
        self._thread = threading.Thread(target=self._listen, name="rendezvous", daemon=True)

    @property
    def must_restart(self) -> bool:
        """Whether the ranks must be ended to wait for the next round."""
        return self._must_restart

    @property
    def leave(self) -> Shutdown | None:
        """What ended this host's part in the job, if anything."""
        return self._leave

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def post(self, message: ElasticMessage) -> None:
        """Tell the rendezvous something. Any thread."""
        with self._lock:
            self._channel.post(message)

    def next_round(self) -> Round | None:
        """Wait for the next round while no rank runs here; ``None`` if there is none."""
        self.post(HostReady())
        with self._changed:
            while self._round is None and self._leave is None:
                self._changed.wait(_POLL_S)
            found, self._round = self._round, None
            return None if self._leave is not None else found

    def finish(self) -> bool:
        """Report that all ranks here have succeeded. Returns whether they must run again."""
        self.post(HostFinished())
        with self._changed:
            while not self._must_restart and self._leave is None:
                self._changed.wait(_POLL_S)
            return self._leave is None

    # ---- the thread ---------------------------------------------------------------------------

    def _listen(self) -> None:
        """Any error here ends this host's part: the rendezvous would not be followed."""
        try:
            self._follow()
        except Exception as error:
            text = f"invalid message from the rendezvous ({type(error).__name__}: {error})"
            self._go(Shutdown(signum=signal.SIGTERM, text=text))

    def _follow(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_READ)
            while self._leave is None:
                events = selector.select(_POLL_S)
                if any(key.fd == self._stdin for key, _ in events) and not os.read(
                    self._stdin, 1 << 12
                ):
                    self._go(Shutdown(signum=signal.SIGTERM, text="the launcher died"))
                    return
                with self._lock:
                    self._channel.flush()
                    messages = self._channel.collect()
                    is_open = self._channel.is_open
                for message in messages:
                    if isinstance(message, HeartbeatRequest):
                        with self._lock:
                            answer(self._channel)
                    else:
                        self._on_message(message)
                if not is_open and self._leave is None:
                    text = "the rendezvous was lost: its process ended, or there is no route to it"
                    self._go(Shutdown(signum=signal.SIGTERM, text=text))

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Shutdown):
            self._go(message)
        elif isinstance(message, Restart):
            with self._changed:
                self._must_restart = True
                self._changed.notify_all()
        elif isinstance(message, Round):
            with self._changed:
                self._round, self._must_restart = message, False
                self._changed.notify_all()
        else:
            raise LaunchError(f"The rendezvous sent {type(message).__name__} to a host.")

    def _go(self, leave: Shutdown) -> None:
        with self._changed:
            self._leave = leave
            self._changed.notify_all()
        os.kill(os.getpid(), leave.signum)
