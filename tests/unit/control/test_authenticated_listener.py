"""The gate: who knows the secret comes in, whatever anybody else does."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from torchmn.control import authenticated_listener as gates
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import (
    MAX_IDENTITY_BYTES,
    AuthenticatedListener,
    connect_authenticated,
)
from torchmn.control.connection import Channel
from torchmn.control.messages import LogWarning, Message, Terminate, encode
from torchmn.errors import LaunchError, UsageError

SECRET = "of this job"
WHO = LogWarning(text="rank 0")
Visitors = list[tuple[Channel, Message]]


class Doorkeeper:
    """Serves a gate in a thread, as a supervisor would, and keeps who came in."""

    def __init__(self, gate: AuthenticatedListener, address: tuple[str, int]) -> None:
        self.gate = gate
        self.address = address
        self.visitors: Visitors = []
        self.max_pending = 0
        self.cpu_s = 0.0
        self._is_done = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def name(self) -> str:
        return "{}:{}".format(*self.address)

    def connect_authenticated(
        self, limit_s: float = 30.0, secret: str = SECRET, role: str = "tests"
    ) -> Channel:
        return connect_authenticated(
            self.name, secret=secret, role=role, identity=WHO, limit_s=limit_s
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def close(self) -> None:
        self._is_done = True
        self._thread.join()
        for channel, _ in self.visitors:
            channel.close()
        self.gate.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.gate, selectors.EVENT_READ)
            while not self._is_done:
                selector.select(0.05)
                before = time.thread_time()
                self.visitors += self.gate.admit()
                self.cpu_s += time.thread_time() - before
                self.max_pending = max(self.max_pending, self.gate.num_pending)


Open = Callable[..., Doorkeeper]


@pytest.fixture
def open_gate() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(max_pending: int = 64, handshake_s: float = 20.0) -> Doorkeeper:
            listener = channels.listen()
            gate = AuthenticatedListener(
                listener,
                secret=SECRET,
                role="tests",
                max_pending=max_pending,
                handshake_s=handshake_s,
            )
            keeper = Doorkeeper(gate, listener.getsockname())
            stack.callback(keeper.close)
            return keeper

        yield make


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up, gently or not."""
    said = b""
    try:
        while chunk := connection.recv(1 << 16):
            said += chunk
    except ConnectionResetError:
        pass
    return said


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def recorded(target: tuple[str, int], takes: list[bytes]) -> Iterator[str]:
    """A way to ``target`` that writes down what passes: the visitor's words, the gate's."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, sink: socket.socket, number: int) -> None:
        try:
            while chunk := source.recv(1 << 16):
                takes[number] += chunk
                sink.sendall(chunk)
        except OSError:
            pass

    def serve() -> None:
        one = listener.accept()[0]
        other = socket.create_connection(target)
        takes[:] = [b"", b""]
        back = threading.Thread(target=carry, args=(other, one, 1))
        back.start()
        carry(one, other, 0)
        other.shutdown(socket.SHUT_RDWR)
        back.join()
        one.close()
        other.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield "{}:{}".format(*listener.getsockname())
        thread.join()


def say_once(listener: socket.socket, words: bytes) -> None:
    """To the first who comes, and then wait until it leaves."""
    connection = listener.accept()[0]
    with connection:
        connection.sendall(words)
        read_all(connection)


def test_who_knows_the_secret_comes_in_and_talks(open_gate: Open) -> None:
    keeper = open_gate()
    with closing(keeper.connect_authenticated()) as own:
        until(lambda: bool(keeper.visitors))
        ((channel, who),) = keeper.visitors
        assert who == WHO
        channel.post(Terminate(signum=3))
        assert own.wait_for(Terminate, 10).signum == 3
        own.post(Terminate(signum=4))
        assert channel.wait_for(Terminate, 10).signum == 4
    assert keeper.gate.num_pending == 0


def test_what_the_gatekeeper_says_at_once_is_not_lost(open_gate: Open) -> None:
    with (
        channels.listen() as listener,
        closing(AuthenticatedListener(listener, secret=SECRET, role="t")) as gate,
    ):

        def serve() -> None:
            while not (visitors := gate.admit()):
                time.sleep(0.001)
            visitors[0][0].post(Terminate(signum=9))
            visitors[0][0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        address = channels.address_of(listener)
        with closing(connect_authenticated(address, secret=SECRET, role="t", identity=WHO)) as own:
            assert own.wait_for(Terminate, 10).signum == 9
        thread.join()


@pytest.mark.parametrize(("secret", "role"), [("another", "tests"), (SECRET, "another")])
def test_wrong_secret_and_other_gates_visitors_stay_outside(
    open_gate: Open, secret: str, role: str
) -> None:
    keeper = open_gate()
    with pytest.raises(LaunchError, match="TORCHMN_SECRET is the same here") as caught:
        keeper.connect_authenticated(limit_s=0.5, secret=secret, role=role)
    assert secret not in str(caught.value)
    assert keeper.visitors == []


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(1000).replace(b"\n", b"x") + b"\n",
        b"\xff" * (MAX_IDENTITY_BYTES + 1),
        b"0" * 32 + b" " + b"0" * 64 + b' ["End", {"signum": 9}]\n',
        b"0" * 32 + b" " + b"0" * 64 + b" " + b"[" * 3000 + b"\n",
        b" \n \n",
    ],
    ids=["empty", "http", "random", "endless", "unsigned", "nested", "spaces"],
)
def test_strangers_hear_one_number_and_no_more(open_gate: Open, said: bytes) -> None:
    keeper = open_gate()
    with keeper.connect() as stranger:
        stranger.sendall(said)
        assert len(read_all(stranger)) <= len(b"torchmn gate 1 \n") + 32
    assert keeper.visitors == []
    keeper.connect_authenticated().close()


def test_signature_over_what_is_no_message_does_not_open(open_gate: Open) -> None:
    """Who knows the secret may still be a broken program."""
    keeper = open_gate()
    visitor = gates.connect(keeper.name, secret=SECRET, role="tests", line=b"[" * 3000 + b"\n")
    with visitor:
        assert read_all(visitor) == b""
    assert keeper.visitors == []


def test_recording_of_a_true_visit_is_of_no_use(open_gate: Open) -> None:
    keeper = open_gate()
    takes: list[bytes] = []
    with recorded(keeper.address, takes) as way:
        connect_authenticated(way, secret=SECRET, role="tests", identity=WHO).close()
    until(lambda: len(keeper.visitors) == 1)
    own, theirs = takes
    assert encode(WHO) in own  # it is the true words that are said again
    with keeper.connect() as stranger:
        stranger.sendall(own)
        assert theirs not in read_all(stranger)
    assert len(keeper.visitors) == 1

    with socket.create_server(("127.0.0.1", 0)) as fake:  # and as the gate, to a visitor
        thread = threading.Thread(target=say_once, args=(fake, theirs))
        thread.start()
        with pytest.raises(LaunchError, match="does not know the secret"):
            connect_authenticated(
                channels.address_of(fake), secret=SECRET, role="tests", identity=WHO
            )
        thread.join()


def test_visitor_is_not_answered_with_its_own_words(open_gate: Open) -> None:
    """A stranger who passes the gate's number on, and the visitor's answer back to the visitor."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def reflect() -> None:
            connection = fake.accept()[0]
            with connection:
                connection.sendall(b"torchmn gate 1 " + b"a" * 32 + b"\n")
                said = connection.recv(MAX_IDENTITY_BYTES)
                connection.sendall(said.split()[1] + b"\n")

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(LaunchError, match="does not know the secret"):
            connect_authenticated(
                channels.address_of(fake), secret=SECRET, role="tests", identity=WHO
            )
        thread.join()


def test_changed_identity_does_not_pass(open_gate: Open) -> None:
    keeper = open_gate()
    with keeper.connect() as stranger:
        number = stranger.recv(100).split()[-1]
        proof = gates._proof(SECRET, b"visitor", "tests", number, b"0" * 32, encode(WHO))
        other = encode(LogWarning(text="rank 1"))
        stranger.sendall(b" ".join((b"0" * 32, proof, other)))
        assert read_all(stranger) == b""
    assert keeper.visitors == []


def test_words_behind_the_proof_do_not_pass(open_gate: Open) -> None:
    """Nothing that came before the answer can count as said inside."""
    keeper = open_gate()
    with keeper.connect() as stranger:
        number = stranger.recv(100).split()[-1]
        proof = gates._proof(SECRET, b"visitor", "tests", number, b"0" * 32, encode(WHO))
        stranger.sendall(b" ".join((b"0" * 32, proof, encode(WHO))) + encode(Terminate(signum=9)))
        assert read_all(stranger) == b""
    assert keeper.visitors == []


def test_silent_and_slow_strangers_are_sent_away(open_gate: Open) -> None:
    keeper = open_gate(handshake_s=0.3)
    with keeper.connect() as silent, keeper.connect() as slow:
        is_shut = threading.Event()

        def trickle() -> None:
            try:
                while not is_shut.wait(0.02):
                    slow.sendall(b"0")
            except OSError:
                is_shut.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert read_all(silent).count(b"\n") == 1
            assert read_all(slow).count(b"\n") == 1
        finally:
            is_shut.set()
            thread.join()
    until(lambda: keeper.gate.num_pending == 0)
    keeper.connect_authenticated().close()


def test_gate_that_was_kept_from_its_work_hears_who_came_in_time() -> None:
    listener = channels.listen()
    with closing(
        AuthenticatedListener(listener, secret=SECRET, role="t", handshake_s=0.01)
    ) as gate:
        address, came = channels.address_of(listener), []
        thread = threading.Thread(
            target=lambda: came.append(
                connect_authenticated(address, secret=SECRET, role="t", identity=WHO, limit_s=20)
            )
        )
        thread.start()
        until(lambda: gate.admit() == [] and gate.num_pending == 1)
        time.sleep(0.2)  # the visitor has answered long ago
        ((channel, _),) = gate.admit()
        thread.join()
        channel.close()
        came[0].close()


def test_crowd_of_strangers_keeps_nobody_out(open_gate: Open) -> None:
    """Ten thousand connections at once and for a second, held and renewed, beside true visitors."""
    keeper = open_gate(max_pending=16)
    is_over = threading.Event()
    num_connected = [0]

    def crowd() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set() or num_connected[0] < 3000:
            try:
                held.append(keeper.connect())
                num_connected[0] += 1
            except OSError:
                break
            if len(held) > 400:
                held.pop(0).close()
        for connection in held:
            connection.close()

    threads = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: num_connected[0] > 500)
        for _ in range(5):
            keeper.connect_authenticated().close()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    until(lambda: len(keeper.visitors) == 5)
    assert num_connected[0] >= 3000
    assert keeper.max_pending <= 16


def test_host_with_most_strangers_makes_room(open_gate: Open) -> None:
    listener = channels.listen("0.0.0.0")  # reached from 127.0.0.2 and .3, as from two hosts
    port = listener.getsockname()[1]
    with (
        closing(AuthenticatedListener(listener, secret=SECRET, role="t", max_pending=3)) as gate,
        ExitStack() as s,
    ):

        def come(host: str) -> socket.socket:
            connection = socket.create_connection(
                ("127.0.0.1", port), timeout=20, source_address=(host, 0)
            )
            s.enter_context(connection)
            num_before = gate.num_pending
            until(lambda: gate.admit() == [] and gate.num_pending >= min(num_before + 1, 3))
            return connection

        quiet, *loud = [come(f"127.0.0.{number}") for number in (2, 3, 3, 3, 3)]
        until(lambda: not gate.admit() and read_or_none(loud[0]) == b"")
        assert read_or_none(loud[1]) == b""
        assert read_or_none(quiet) is None
        assert read_or_none(loud[-1]) is None


def read_or_none(connection: socket.socket) -> bytes | None:
    """What is there behind the greeting; empty if the gate hung up, ``None`` if nothing is."""
    connection.settimeout(0.05)
    try:
        while said := connection.recv(100):
            assert said.startswith(b"torchmn gate")
    except ConnectionResetError:
        return b""
    except TimeoutError:
        return None
    return said


def test_gate_outlives_a_process_without_free_descriptors() -> None:
    listener = channels.listen()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(AuthenticatedListener(listener, secret=SECRET, role="t")) as gate:
        address = channels.address_of(listener)
        stranger = socket.create_connection(listener.getsockname())
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many"):
                os.dup(0)
            for _ in range(3):
                assert gate.admit() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with selectors.DefaultSelector() as selector:  # it does not spin in want of room
            selector.register(gate, selectors.EVENT_READ)
            assert selector.select(0) == []
        visitors: Visitors = []
        came: list[Channel] = []
        thread = threading.Thread(
            target=lambda: came.append(
                connect_authenticated(address, secret=SECRET, role="t", identity=WHO)
            )
        )
        thread.start()
        until(lambda: bool(visitors.extend(gate.admit()) or visitors))
        thread.join()
        for channel in (visitors[0][0], came[0]):
            channel.close()
        stranger.close()


def test_gate_needs_a_secret() -> None:
    with channels.listen() as listener, pytest.raises(UsageError, match="needs a secret"):
        AuthenticatedListener(listener, secret="", role="tests")


def test_closed_gate_closes_who_waits(open_gate: Open) -> None:
    listener = channels.listen()
    gate = AuthenticatedListener(listener, secret=SECRET, role="t")
    with socket.create_connection(listener.getsockname(), timeout=20) as stranger:
        until(lambda: gate.admit() == [] and gate.num_pending == 1)
        gate.close()
        assert read_all(stranger).count(b"\n") <= 1


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:x", "127.0.0.1:1", "::1:99999"])
def test_address_where_nobody_answers(address: str) -> None:
    with pytest.raises(LaunchError, match="does not answer"):
        connect_authenticated(address, secret=SECRET, role="tests", identity=WHO, limit_s=2)


def test_visitor_asks_somebody_else_and_gives_up(open_gate: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = channels.address_of(other)
        with pytest.raises(LaunchError, match="does not answer: timed out"):
            connect_authenticated(address, secret=SECRET, role="tests", identity=WHO, limit_s=0.1)
        other.accept()[0].close()
        thread = threading.Thread(target=say_once, args=(other, b"?" * 99))
        thread.start()
        with pytest.raises(LaunchError, match="instead of the tests says"):
            connect_authenticated(address, secret=SECRET, role="tests", identity=WHO, limit_s=5)
        thread.join()


def test_visitor_that_says_too_much_is_told_so() -> None:
    with pytest.raises(LaunchError, match="must be shorter than 4096"):
        connect_authenticated(
            "127.0.0.1:1",
            secret=SECRET,
            role="t",
            identity=LogWarning(text="x" * MAX_IDENTITY_BYTES),
        )
