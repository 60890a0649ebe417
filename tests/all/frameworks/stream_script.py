"""Streams of a library on ranks: `stream_script.py LIBRARY FOLDER` prints what differs from one
process, as a JSON list on rank 0."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchmn

NUM = 40
SHARES = {"rank_0": False, "each_rank": True}
"""Who reads, and whether the data set yields the share of this rank."""
comm = torchmn.create_communicator()
library, folder = sys.argv[1], Path(sys.argv[2])
failed: list[str] = []


def expect(is_right: bool, what: str) -> None:
    """Note what is wrong on any rank."""
    if not all(comm.allgather_obj(is_right)):
        failed.append(what)


def numbers_of(batches: Any) -> list[list[int]]:
    """The numbers in each batch that is received."""
    return [list(map(int, values_of(batch))) for batch in batches]


def values_of(batch: Any) -> Any:
    """The numbers of the samples in a batch."""
    if isinstance(batch, dict):
        return batch["n"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def expect_refused(share: Any) -> None:
    """Rank 0 must not read the share of one rank."""
    try:
        torchmn.scatter_loader(share, comm, read_by="rank_0")
        failed.append("a share is read by rank 0")
    except torchmn.TorchmnError as error:
        expect("would never be read" in str(error), str(error))


def check(make: Callable[[], Any], read_by: Any, name: str, *, resumes_last: bool = True) -> None:
    """All samples once, in each pass; the rest of a pass after a resume in the middle of it."""
    loader = torchmn.scatter_loader(make(), comm, read_by=read_by)
    for number in range(2):
        own = numbers_of(loader)
        everyone = comm.allgather_obj(own)
        seen = sorted(sum(sum(everyone, []), []))
        expect(seen == [*range(NUM)], f"{name}: pass {number} has {seen}")
        expect(len({*map(len, everyone)}) == 1, f"{name}: the numbers of steps differ")
    for num_before in (2, len(own)) if resumes_last else (2,):
        loader = torchmn.scatter_loader(make(), comm, read_by=read_by)
        batches = iter(loader)
        first = numbers_of(itertools.islice(batches, num_before))
        resumed = torchmn.scatter_loader(make(), comm, read_by=read_by)
        resumed.load_state_dict(loader.state_dict())
        for number, own in enumerate((first + numbers_of(resumed), numbers_of(resumed))):
            seen = sorted(sum(sum(comm.allgather_obj(own), []), []))
            what = f"pass {number} of a resume after {num_before} batches"
            expect(seen == [*range(NUM)], f"{name}: {what} has {seen}")


def hugging_face() -> None:
    """A stream of several shards, split by node or not; shuffled ones are read again."""
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node

    def rows(shards: list[range]) -> Any:
        for n in itertools.chain(*shards):
            yield {"n": n}

    def made(is_share: bool, workers: int, is_shuffled: bool, kind: Any = DataLoader) -> Any:
        shards = [range(begin, NUM, 6) for begin in range(6)]
        data = IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})
        if is_shuffled:
            data = data.shuffle(seed=1, buffer_size=4)
        data = data.map(lambda row: {"twice": 2 * row["n"]}).with_format("torch")
        if is_share:
            data = split_dataset_by_node(data, comm.rank, comm.size)
        return kind(data, 6, num_workers=workers)

    kinds = [DataLoader]
    if importlib.util.find_spec("torchdata") is not None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kinds.append(StatefulDataLoader)
    for kind, workers, is_shuffled in itertools.product(kinds, (0, 1), (False, True)):
        for read_by, is_share in SHARES.items():
            name = f"{kind.__name__}, {read_by}, {workers} workers, {is_shuffled=}"
            check(partial(made, is_share, workers, is_shuffled, kind), read_by, name)
    expect_refused(made(True, 0, False))


def webdataset() -> None:
    """Tar files, by DataLoader and by WebLoader, whose batches are made before."""
    import webdataset as wds

    names = [str(folder / f"{number}.tar") for number in range(5)]
    for number, name in enumerate(names if comm.rank == 0 else ()):
        with wds.TarWriter(name) as writer:
            for n in range(8 * number, 8 * number + 8):
                writer.write({"__key__": f"{n:04}", "n.cls": n})
    comm.barrier()

    def stream(is_share: bool) -> Any:
        by_node = wds.split_by_node if is_share else lambda source: source
        data = wds.WebDataset(names, shardshuffle=False, nodesplitter=by_node)
        return data.decode().to_tuple("n.cls")

    def loader(is_share: bool, workers: int) -> Any:
        return DataLoader(stream(is_share), 6, num_workers=workers)

    def of_batches(is_share: bool, workers: int) -> Any:
        return wds.WebLoader(stream(is_share).batched(3), batch_size=None, num_workers=workers)

    for workers, make in itertools.product((0, 1), (loader, of_batches)):
        for read_by, is_share in SHARES.items():
            check(partial(make, is_share, workers), read_by, f"{make.__name__}, {read_by}")
    for make in (loader, of_batches):
        expect_refused(make(True, 0))


class Resumable(torch.utils.data.IterableDataset[int]):
    """With a state, as torchdata wants it."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.position = numbers, 0

    def __iter__(self) -> Any:
        for number in self.numbers[self.position :]:
            self.position += 1
            yield number
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""
        self.position = state["position"]


def torchdata() -> None:
    """Its loader, which has a state of its own."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(is_share: bool, workers: int) -> Any:
        numbers = range(comm.rank, NUM, comm.size) if is_share else range(NUM)
        return StatefulDataLoader(Resumable(numbers), 6, num_workers=workers)

    for workers in (0, 1):
        for read_by, is_share in SHARES.items():
            # In a worker the state of `Resumable` after its last sample is that of its beginning.
            name, resumes_last = f"{read_by}, {workers} workers", workers == 0
            check(partial(loader, is_share, workers), read_by, name, resumes_last=resumes_last)


def litdata() -> None:
    """Chunks, which litdata divides among the ranks by the variable GLOBAL_RANK."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.cache import Cache

    if comm.rank == 0:
        size = os.environ.pop("WORLD_SIZE")
        cache = Cache(str(folder), chunk_size=4)
        for n in range(NUM):
            cache[n] = {"n": n}
        cache.done()
        cache.merge()
        os.environ["WORLD_SIZE"] = size
    comm.barrier()

    def loader(kind: Any, workers: int) -> Any:
        data = StreamingDataset(str(folder), shuffle=True, seed=0, drop_last=False)
        return kind(data, batch_size=6, num_workers=workers)

    try:
        torchmn.scatter_loader(loader(DataLoader, 0), comm, read_by="each_rank")
        failed.append("two ranks read the share of one")
    except torchmn.TorchmnError as error:
        expect("GLOBAL_RANK" in str(error), str(error))
    os.environ["GLOBAL_RANK"] = str(comm.rank)
    for workers, kind in itertools.product((0, 1), (DataLoader, StreamingDataLoader)):
        name = f"{kind.__name__}, {workers} workers"
        # The state of a StreamingDataLoader after its last batch is that of the next pass.
        resumes_last = kind is DataLoader
        check(partial(loader, kind, workers), "each_rank", name, resumes_last=resumes_last)


LIBRARIES = {
    "datasets": hugging_face,
    "webdataset": webdataset,
    "torchdata": torchdata,
    "litdata": litdata,
}

if __name__ == "__main__":
    LIBRARIES[library]()
    if comm.rank == 0:
        print("found", json.dumps(failed))
