"""What a sampler keeps is on all ranks that of one process. Ranks are processes: threads share it.

Each rank loops over a plain loader and over one of `scatter_loader`, made alike, and compares.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

SCRIPT = """
import itertools, random
import numpy as np, torch, torchmn
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

class Own(Sampler):
    def __init__(self):
        self.numbers, self.epoch = np.random.default_rng(3), 0
    def __len__(self):
        return 20
    def __iter__(self):
        self.epoch += 1
        self.order = [int(i) for i in self.numbers.permutation(20)]
        return iter(self.order)
    def state(self):
        return self.epoch, self.order, self.numbers.random()

class Endless(Own):
    __len__ = None
    def __iter__(self):
        while True:
            yield from super().__iter__()

class FromProcess(Own):
    def __iter__(self):
        self.order = np.random.permutation(20).tolist() + [random.random()]
        return iter(self.order[:20])
    def state(self):
        return self.order

def own(kind, **options):
    sampler = kind()
    return DataLoader(data, 4, sampler=sampler, **options), sampler.state

def generator(**options):
    one = torch.Generator().manual_seed(5)
    return DataLoader(data, 4, shuffle=True, generator=one, **options), one.get_state

def replacing():
    one = torch.Generator().manual_seed(5)
    sampler = RandomSampler(data, True, 90, generator=one)
    return DataLoader(data, 4, sampler=sampler), one.get_state

comm = torchmn.create_communicator()
data = TensorDataset(torch.arange(20))
cases = {
    "own": lambda: own(Own), "of the process": lambda: own(FromProcess), "generator": generator,
    "workers": lambda: generator(num_workers=1), "replacing": replacing,
    "persistent": lambda: generator(num_workers=1, persistent_workers=True),
}
for name, make in cases.items():
    states = []
    for number in range(2):
        torchmn.seed_ranks(0, comm)
        loader, state = make()
        if number:
            loader = torchmn.scatter_loader(loader, comm)
        random.random() if comm.rank else None  # as in training: ranks draw by themselves
        seen = []
        for length in (None, 1, None):  # the second pass is left
            list(itertools.islice(loader, length))
            seen.append(str(state()))
        states.append(seen)
    if name == "of the process":
        states[0] = comm.bcast_obj(states[1])
    assert states[0] == states[1], (comm.rank, name, states)
loader, state = own(Endless)
assert len([*itertools.islice(torchmn.scatter_loader(loader, comm), 9)]) == 9
assert len(set(comm.allgather_obj(str(state())))) == 1
print("equal", flush=True)
"""


@pytest.mark.processes
def test_a_sampler_s_state_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torchmn", "run", "-n", "2", str(script)],
        capture_output=True, text=True, timeout=limit(55), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("equal") == 2
