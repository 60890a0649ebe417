"""Sources under StandardUpdater, DataLoader and ordinary loops, on one rank and on several."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.contracts.suites.source_contracts import Numbers
from tests.limits import limit
from tests.unit.cntk.readers.forks import forked
from torchmn import create_multi_node_checkpointer, create_multi_node_optimizer
from torchmn.cntk.readers import (
    MinibatchIterator,
    MinibatchSource,
    MinibatchSourceFromData,
    StreamInformation,
    UserDeserializer,
)
from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError
from torchmn.testing import run_ranks
from torchmn.train import StandardUpdater

COUNT = 21


def source(**options: Any) -> MinibatchSourceFromData:
    rows = np.arange(COUNT, dtype=np.float32).reshape(COUNT, 1)
    return MinibatchSourceFromData({"x": rows, "y": 3 * rows}, randomize=True, **options)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.weight * x.double() - y.double()) ** 2).mean()


def trained(comm: Communicator, num_epochs: int = 2, **options: Any) -> tuple[float, list[int]]:
    model = Line()
    optimizer = create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), comm, model, weight="samples"
    )
    iterator = MinibatchIterator(source(), 4, comm=comm)
    updater = StandardUpdater(iterator, optimizer, model)
    ends = []
    while updater.epoch < num_epochs:
        updater.update()
        if updater.is_new_epoch:
            ends.append(updater.iteration)
    return model.weight.item(), ends


def test_an_updater_trains_the_same_on_any_number_of_ranks() -> None:
    (weight, ends), *_ = run_ranks(trained, 1)
    assert ends == [6, 11]  # 21 samples in minibatches of 4, over the end of the sweep
    for size in (2, 3, 8):  # 8: some ranks have nothing in every step
        for other, other_ends in run_ranks(trained, size):
            assert other == pytest.approx(weight, rel=1e-12)
            assert other_ends == ends


def test_epoch_details_and_the_end() -> None:
    iterator = MinibatchIterator(source(max_sweeps=1), 4)
    details = []
    for _ in iterator:
        details.append((iterator.previous_epoch_detail, iterator.epoch_detail))
    assert details[0] == (0.0, pytest.approx(4 / COUNT))
    assert details[-1] == (pytest.approx(20 / COUNT), 1.0)
    assert iterator.is_new_epoch
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_checkpointer_saves_sources_for_any_number_of_ranks(tmp_path: Path) -> None:
    def pieces() -> MinibatchSource:
        return MinibatchSource(Numbers(lengths=lambda n: 3 + n % 5), truncation_length=4)

    def drawn(comm: Communicator, resumes: bool) -> list[Any]:
        rows, iterator = pieces(), MinibatchIterator(source(), 4, comm=comm)
        parts = (comm.size, comm.rank)
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "sources")
        state = {"rows": rows, "iterator": iterator}
        if resumes:
            assert checkpointer.resume(state) == 3
        else:
            for _ in range(3):
                next(iterator)
                rows.next_minibatch(16, None, None, *parts)
            checkpointer.save(3, state)
        steps = [
            [
                *next(iterator)["x"].flatten().tolist(),
                *rows.next_minibatch(16, {"n": "number"}, None, *parts)["n"]
                .data.flatten()
                .tolist(),
            ]
            for _ in range(6)
        ]
        checkpointer.finish()
        rows.close()
        gathered = comm.allgather_obj([[float(n) for n in step] for step in steps])
        return [sorted(sum(step, [])) for step in zip(*gathered, strict=True)]

    wanted = run_ranks(lambda comm: drawn(comm, False), 2)[0]
    assert run_ranks(lambda comm: drawn(comm, True), 3)[0] == wanted


def test_sequences_need_a_collate_function() -> None:
    sequences = [np.ones((n, 2), np.float32) for n in (2, 3)]
    from_data = MinibatchSourceFromData({"s": sequences})
    with pytest.raises(UnsupportedError, match=r"'s' has sequences of several samples.*padded"):
        next(MinibatchIterator(from_data, 10))
    iterator = MinibatchIterator(from_data, 5, collate_fn=lambda m: m["s"].padded())
    padded, mask = next(iterator)
    assert padded.shape == (2, 3, 2)
    assert mask.tolist() == [[True, True, False], [True, True, True]]


class Held(UserDeserializer):
    """A thread is in the middle of reading a chunk while the process forks."""

    def __init__(self) -> None:
        self.is_reading, self.may_end = threading.Event(), threading.Event()

    def stream_infos(self) -> list[StreamInformation]:
        return [StreamInformation("x", shape=(1,))]

    def num_chunks(self) -> int:
        return 6

    def get_chunk(self, chunk_id: int) -> Any:
        if threading.current_thread().name == "holder":
            self.is_reading.set()
            self.may_end.wait(limit(30))
        return {"x": np.full((4, 1), float(chunk_id))}


def test_a_fork_while_a_thread_reads() -> None:
    held = Held()
    held_source = MinibatchSource(held, randomize=False)
    held_source.next_minibatch(4)
    assert held_source.next_minibatch(4)
    read = held_source._deserializer.get_chunk
    holder = threading.Thread(target=lambda: (read(3), read(3)), name="holder", daemon=True)
    holder.start()
    assert held.is_reading.wait(limit(10))
    held_source.go_to_sweep(1)
    assert forked(lambda: sum(len(m["x"].data) for m in held_source.minibatches_of_sweep(8))) == 24
    held.may_end.set()
    holder.join()
    held_source.close()
