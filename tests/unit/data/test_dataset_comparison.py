"""Ranks whose data sets differ at equal length are told, and others are not."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from torchmn.data import GlobalSampler, SubDataset, scatter_dataset, scatter_loader
from torchmn.errors import RankMismatchError
from torchmn.testing import run_ranks

NUM = 60


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tensors(seed: int = 0) -> TensorDataset:
    order = torch.randperm(NUM, generator=_generator(seed))
    x = torch.arange(3.0 * NUM).view(NUM, 3)
    return TensorDataset(x[order], order)


class Folder(Dataset[tuple[Any, int]]):
    """As torchvision's ImageFolder; its files cannot be read here."""

    def __init__(self, root: str, names: list[str], classes: str = "ab") -> None:
        self.root = root
        self.classes = [*classes]
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        self.samples = [(f"{root}/{name}", self.class_to_idx[name[0]]) for name in names]
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        raise OSError(self.samples[index][0])


class Files(Dataset[Path]):
    """Files of one folder."""

    def __init__(self, folder: str, numbers: list[int]) -> None:
        self.files = [Path(folder) / f"{number}.png" for number in numbers]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Path:
        return self.files[index]


class Computed(Dataset[Any]):
    """Without an attribute that tells its samples."""

    def __init__(self, offset: int = 0, compute: Callable[[int], Any] = float) -> None:
        self.offset = offset
        self.compute = compute
        self.num_reads = 0

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self.compute(index + self.offset)


class Cached(Dataset[Any]):
    """Keeps what it has read."""

    def __init__(self, read: list[int]) -> None:
        self.x = torch.arange(NUM)
        self.kept = [self.x[i] if i in read else None for i in range(NUM)]

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class OfRows(list[Any]):
    """As a Dataset of Hugging Face: samples are read with or without a transform."""

    def __init__(self, rows: list[Any], transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(rows)
        self.transform = transform

    def with_format(self, _: None) -> OfRows:
        return OfRows([*self])

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        return self.transform(row) if self.transform else row


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "tensors": (_tensors, "tensors[0]"),
    "split": (lambda rank: random_split(_tensors(), [40, 20], _generator(rank))[0], "indices"),
    "part": (lambda rank: SubDataset(range(NUM), rank, rank + 4), "indices"),
    "joined": (
        lambda rank: ConcatDataset([_tensors(), Subset(_tensors(), [rank, 5])]),
        "datasets[1].indices",
    ),
    "subset of another": (lambda rank: Subset(_tensors(rank), range(5)), "dataset.tensors[0]"),
    "names": (lambda rank: Folder("/data", ["a/1", ["b/1", "b/2"][rank]]), "samples"),
    "classes": (lambda rank: Folder("/data", ["a/1", "b/1"], ["ab", "ba"][rank]), "classes"),
    "order of files": (lambda rank: Files("/data", [[1, 2], [2, 1]][rank]), "files"),
    "list": (lambda rank: [(f"{i}.png", i) for i in ([1, 2], [2, 1])[rank]], "its samples"),
    "dict": (lambda rank: {"x": 1, "y": 2 + rank}, "its samples"),
    "arrays in a dict": (
        lambda rank: Subset(_OfDict(np.arange(NUM) + rank), range(4)),
        "dataset.fields['x']",
    ),
    "read": (lambda rank: Computed(rank), "its samples"),
    "read, global random numbers": (
        lambda rank: Computed(rank, lambda index: index + random.random()),
        "its samples",
    ),
    "rows": (lambda rank: OfRows([{"text": f"{i + rank}"} for i in range(9)]), "its samples"),
}


@dataclasses.dataclass
class _OfDict(Dataset[Any]):
    x: dataclasses.InitVar[Any]
    fields: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self, x: Any) -> None:
        self.fields = {"x": x}

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return self.fields["x"][index]


def _random_flip() -> Callable[[int], int]:
    own = np.random.default_rng()  # of each rank
    return lambda index: index if own.random() < 0.5 else -index


def _raise(index: int) -> None:
    raise OSError(index)


SAME: dict[str, Callable[[int], Any]] = {
    "tensors": lambda rank: _tensors(),
    "rounded": lambda rank: TensorDataset(torch.arange(9.0) * (1 + 1e-4 * rank)),
    "folder elsewhere": lambda rank: Folder(f"/host{rank}/data", ["a/1", "b/1", "b/2"]),
    "files elsewhere": lambda rank: Files(f"/host{rank}", [1, 2]),
    "cache": lambda rank: Cached([rank, 7]),
    "own random numbers": lambda rank: Computed(0, _random_flip()),
    "slow": lambda rank: Computed(rank, lambda index: time.sleep(0.2)),
    "cannot be read": lambda rank: Computed(rank, _raise),
    "transform with random numbers of its own": lambda rank: OfRows([1, 2, 3], _random_flip()),
    "empty": lambda rank: TensorDataset(torch.zeros(0, 3)),
    "a set": lambda rank: [{"x": {"b", "a"}}] * 3,
}


def _loaded(comm: Any, dataset: Any, num_workers: int = 0) -> object:
    batches = [[index] for index in dataset] if isinstance(dataset, dict) else [[0], [1]]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
    return scatter_loader(loader, comm)


@pytest.mark.parametrize("name", DIFFERENT)
def test_data_sets_that_differ(name: str) -> None:
    make, attribute = DIFFERENT[name]

    def rank_main(comm):
        with pytest.raises(RankMismatchError) as caught:
            _loaded(comm, make(int(comm.rank == 1)))
        return str(caught.value)

    texts = run_ranks(rank_main, 3)
    assert len({*texts}) == 1
    assert "the data set of rank 1 of 3" in texts[0]
    assert attribute in texts[0].split("a different order: ")[1].split(" differ. Some")[0]


@pytest.mark.parametrize("name", SAME)
def test_data_sets_that_are_equal_or_cannot_be_compared(name: str) -> None:
    run_ranks(lambda comm: _loaded(comm, SAME[name](comm.rank)), 2)


def test_a_class_without_attributes_is_not_read_if_there_are_workers() -> None:
    run_ranks(lambda comm: _loaded(comm, Computed(comm.rank), num_workers=1), 2)


class _Draws:
    """A transform that draws from numbers of its own and from those of the process."""

    def __init__(self) -> None:
        self.own = random.Random(5)

    def __call__(self, index: int) -> Any:
        return self.own.random(), random.random(), torch.rand(1)


def test_reading_leaves_the_data_set_and_the_random_numbers_alone() -> None:
    draws = _Draws()
    data = Computed(0, draws)
    before = draws.own.getstate(), random.getstate(), torch.get_rng_state()
    run_ranks(lambda comm: _loaded(comm, data), 2)
    assert data.num_reads == 0
    assert (draws.own.getstate(), random.getstate()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("root", [0, 1])
def test_scatter_dataset(root: int) -> None:
    def rank_main(comm):
        with pytest.raises(RankMismatchError, match=f"scatter_dataset.*that of rank {root}"):
            scatter_dataset(_tensors(comm.rank % 2), comm, root)
        # Ranks without a data set are not compared.
        return sorted(
            index.item()
            for _, index in scatter_dataset(
                _tensors(comm.rank) if comm.rank == root else None, comm, root
            )
        )

    parts = run_ranks(rank_main, 3)
    assert sorted({index for part in parts for index in part}) == [*range(NUM)]


def test_global_sampler() -> None:
    def rank_main(comm):
        same = [*GlobalSampler(_tensors(), comm, 20, shuffle=False)]
        with pytest.raises(RankMismatchError, match=r"GlobalSampler: .*tensors\[0\]"):
            GlobalSampler(_tensors(comm.rank), comm, 20)
        with pytest.raises(RankMismatchError, match="is a data set"):
            GlobalSampler(_tensors() if comm.rank else NUM, comm, 20)
        return same == [*GlobalSampler(NUM, comm, 20, shuffle=False)]

    assert all(run_ranks(rank_main, 2))


def test_the_data_set_of_several_loaders_is_named() -> None:
    def rank_main(comm):
        loaders = [DataLoader(_tensors(), 4), DataLoader(_tensors(comm.rank), 4)]
        with pytest.raises(RankMismatchError, match=r"tensors\[0\] of data set 1"):
            scatter_loader(loaders, comm)

    run_ranks(rank_main, 2)
