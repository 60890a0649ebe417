"""One rank alone looks at its gradients, and on a device it knows a step later what it has seen."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_ranks
from tests.unit.exchange.test_deferred_checks import LateStreams, diverging_step, late
from tests.unit.models import wrap
from torchmn.errors import NonFiniteGradientError, UnsupportedError


@on_ranks(1)
def test_a_step_waits_for_nothing_and_the_next_one_raises(comm) -> None:
    model, optimizer = wrap(late(comm))
    for step in range(3):
        diverging_step(comm, optimizer, model, is_bad=step == 1)
        comm.engine.streams.arrive()
        if step < 2:
            optimizer.step()
    assert comm.engine.streams.num_waits == 0
    with pytest.raises(NonFiniteGradientError, match=r"at step 1 .*have taken the step"):
        optimizer.step()
    assert [problem.step for problem in optimizer.nonfinite] == [1]


@on_ranks(1)
def test_flush_looks_at_the_last_step(comm) -> None:
    model, optimizer = wrap(late(comm))
    diverging_step(comm, optimizer, model, is_bad=True)
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match="at step 0"):
        optimizer.flush()


class Capturing(LateStreams):
    def is_capturing(self) -> bool:
        return True


@on_ranks(2)
def test_a_graph_of_several_ranks_is_refused_before_anything_has_begun(comm) -> None:
    model, optimizer = wrap(late(comm))
    usual, comm.engine.streams = comm.engine.streams, Capturing()
    with pytest.raises(UnsupportedError, match="A CUDA graph is being captured"):
        diverging_step(comm, optimizer, model, is_bad=False)
    assert comm.engine.streams.events == []
    comm.engine.streams = usual
    for _ in range(2):
        diverging_step(comm, optimizer, model, is_bad=False)
        optimizer.step()
    optimizer.flush()


@on_ranks(1)
def test_nothing_is_looked_at_while_a_graph_is_captured(comm) -> None:
    model, optimizer = wrap(comm)
    comm.engine.streams = Capturing()
    for _ in range(2):
        diverging_step(comm, optimizer, model, is_bad=True)
        optimizer.step()
    assert comm.engine.streams.events == []
    assert bool(torch.isnan(next(model.parameters())).any())
