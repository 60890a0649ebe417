"""The agent of a rank, with this process as its supervisor."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.limits import limit
from torchmn.control import connection as channels
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.messages import Alive, HeartbeatRequest, StartScript
from torchmn.run.job import Job
from torchmn.run.rank_environment import worker_environment
from torchmn.run.starters import local

pytestmark = pytest.mark.processes


def test_a_question_that_arrives_with_the_order_is_answered(tmp_path: Path) -> None:
    """Else no other one follows, and the agent is taken for lost."""
    listener = channels.listen_on()
    script = (sys.executable, "-c", "import time; time.sleep(600)")
    job = Job(argv=script, num_ranks=1, backend="gloo", log_dir=tmp_path)
    env = worker_environment(job, os.environ, supervisor=channels.address_of(listener))
    (command,) = local.commands(job, env)
    order = StartScript(
        argv=list(script),
        cwd=str(tmp_path),
        log_dir=str(tmp_path),
        grace_s=1.0,
        signal_grace_s=1.0,
        wants_refreshes=False,
        script="",
        env={},
    )
    deadline = time.monotonic() + limit(60)
    with (
        closing(
            AuthenticatedListener(listener, secret=job.secret, role=channels.SUPERVISOR)
        ) as accepting,
        subprocess.Popen(command.argv, env=command.env) as agent,
    ):
        while not (admitted := list(accepting.admit())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        channel = admitted[0][0]
        agent.send_signal(signal.SIGSTOP)  # it reads both at once
        channel.post(order)
        channel.post(HeartbeatRequest())
        agent.send_signal(signal.SIGCONT)
        received = []
        while not any(isinstance(message, Alive) for message in received):
            assert time.monotonic() < deadline, received
            received += channel.collect()
            time.sleep(0.01)
        channel.close()
