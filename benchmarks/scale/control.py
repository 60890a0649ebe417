"""The launcher's work for many ranks: real connections to a process that imitates all agents.

What is measured is the processor time of the launcher's own loop (`AgentSession`), which is what
limits it: the agents of a real job have processors of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import selectors
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener, connect_authenticated
from torchmn.control.connection import Channel
from torchmn.control.messages import (
    AgentHello,
    Alive,
    CollectiveStatus,
    Exit,
    HeartbeatRequest,
    Joining,
    Output,
    ScriptStarted,
    StartScript,
    StatusReply,
    StatusRequest,
    Terminate,
)
from torchmn.run.agent_session import AgentSession
from torchmn.run.console import RankOutput
from torchmn.run.job import Job

LIMIT_S = 2.0
PHASE_LIMIT_S = 150.0
STACKS = "MainThread:\n" + '  File "/home/user/train.py", line 120, in step\n    f()\n' * 25
RANKS_PER_HOST = 8
AT_ONCE = 32
"""Agents that connect at the same time."""


def run_control(num_ranks: int) -> dict[str, float]:
    """Processor seconds of each phase, its bytes, and the size of the hang report."""
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        job = Job(argv=("train.py",), num_ranks=num_ranks, backend="gloo", log_dir=Path(name))
        listener = channels.listen_on("127.0.0.1")
        context = multiprocessing.get_context("fork")
        peers = context.Process(
            target=_imitate, args=(channels.address_of(listener), job.secret, num_ranks)
        )
        peers.start()
        authenticated = AuthenticatedListener(listener, secret=job.secret, role=channels.SUPERVISOR)
        output = RankOutput(nowhere, nowhere)
        session = AgentSession(authenticated, num_ranks, job, Path(name), output)
        try:
            with closing(session):
                return _phases(session, num_ranks)
        finally:
            peers.join(10)
            peers.kill()


def _phases(session: AgentSession, num_ranks: int) -> dict[str, float]:
    records = session.records
    found: dict[str, float] = {}

    def phase(name: str, is_done: Callable[[], bool], is_ending: bool = False) -> None:
        cpu, began, turns = time.process_time(), time.monotonic(), 0
        while not is_done():
            if time.monotonic() - began > PHASE_LIMIT_S:
                raise RuntimeError(f"{name} took longer than {PHASE_LIMIT_S} s")
            with selectors.DefaultSelector() as selector:
                session.register(selector)
                for key, _ in selector.select(0.2):
                    key.data()
            session.accept()
            now = session.clock.tick()
            if not is_ending and session.must_end(now):
                break
            turns += 1
        found[f"{name}_cpu_s"] = time.process_time() - cpu
        found[f"{name}_s"] = time.monotonic() - began
        found[f"{name}_turns"] = turns

    phase("connect", lambda: session.is_complete)
    phase("output", lambda: all(record.num_lines for record in records))
    phase("hang", lambda: session.detector.hang is not None)
    hang = session.detector.hang
    found["hang_chars"] = len(hang.text) if hang else 0
    found["hang_replies"] = sum(record.status_reply is not None for record in records)
    found["is_named"] = float(hang is not None and f"rank {num_ranks - 1} " in hang.summary)
    session.end()
    phase("end", lambda: all(record.has_ended for record in records), is_ending=True)
    cpu = time.process_time()
    session.result()
    found["result_cpu_s"] = time.process_time() - cpu
    return found


def _imitate(address: str, secret: str, num_ranks: int) -> None:
    """All agents in one process: they do what real ones do, and the last rank does not join."""
    selector = selectors.DefaultSelector()

    def connected(rank: int) -> Channel:
        hello = AgentHello(
            rank=rank,
            host=f"node{rank // RANKS_PER_HOST}",
            pid=os.getpid(),
            address="127.0.0.1",
            port=1,
            versions={"torch": "2.13.0", "torchmn": "0.1.0", "Python": "3.11.7"},
        )
        return connect_authenticated(
            address, secret=secret, role=channels.SUPERVISOR, identity=hello, limit_s=120.0
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        opened = list(pool.map(connected, range(num_ranks)))
    for rank, channel in enumerate(opened):
        answer = partial(_answer, channel, rank, num_ranks)
        selector.register(channel, selectors.EVENT_READ, answer)
    while selector.get_map():
        for key, _ in selector.select(1.0):
            if not key.data():
                selector.unregister(key.fileobj)
        if os.getppid() == 1:
            return


def _answer(channel: Channel, rank: int, num_ranks: int) -> bool:
    for message in channel.collect():
        if isinstance(message, StartScript):
            channel.post(ScriptStarted(pid=os.getpid(), cores=[0], num_threads=1))
            channel.post(Output(stream="out", lines=["one line of output"], num_bytes=19))
            if rank < num_ranks - 1:
                channel.post(Joining(limit_s=LIMIT_S))
        elif isinstance(message, HeartbeatRequest):
            channel.post(Alive(stopped=[]))
        elif isinstance(message, StatusRequest):
            own = CollectiveStatus(group="world", number=7, what="all_reduce", state="running")
            channel.post(StatusReply(collectives=(own,), stacks=STACKS))
        elif isinstance(message, Terminate):
            channel.post(Exit(returncode=-15, ended_at=time.time(), ended_by="supervisor"))
    channel.flush()
    return channel.is_open


def num_descriptors() -> int:
    """How many connections this process may have."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
