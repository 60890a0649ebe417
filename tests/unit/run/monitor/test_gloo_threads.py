"""Threads of gloo have dropped their Python objects before the interpreter finalizes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from torchmn.run.monitor.bootstrap import wait_for_gloo_threads

NUM_LATE, MAX_TRIES = 5, 5000


class Context:
    """As the context variables that autograd keeps for the threads of a backward pass."""


@pytest.fixture
def slow_switches() -> Iterator[None]:
    """A thread that waits for the interpreter gets it only when this one gives it up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at threads in /proc")
@pytest.mark.skipif(
    not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot drop the object again"
)
@pytest.mark.usefixtures("slow_switches")
def test_they_have_dropped_the_objects_of_complete_work() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    wait_for_gloo_threads()
    num_late = num_tries = 0
    while num_late < NUM_LATE and num_tries < MAX_TRIES:
        num_tries += 1
        context = Context()
        kept = weakref.ref(context)
        torch._C._stash_obj_in_tls("context", context)
        work = group.allreduce([torch.ones(1)])
        torch._C._remove_obj_from_tls("context")
        del context
        work.wait()
        del work
        num_late += kept() is not None  # one in ten
        wait_for_gloo_threads()
        assert kept() is None
    assert num_late, "work was never late: this test shows nothing"
