"""A function in a process that was forked from this one."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.limits import limit


def forked(function: Callable[[], Any]) -> Any:
    """What the function returns there."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function()), daemon=True)
    process.start()
    assert receiver.poll(limit(30)), "the process that was forked hangs"
    result = receiver.recv()
    process.join()
    return result
