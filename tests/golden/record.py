"""Records what one tree of the sources computes, sends, saves and imports, as JSON.

``python tests/golden/record.py runs`` or ``imports``, with ``PYTHONPATH`` set to the ``src`` of
the tree. `compare.py` starts it for two trees, so that this file uses only names that both have:
the public ones, which stay where they are when modules move. It imports nothing from ``tests``.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

Record = dict[str, dict[str, Any]]

NUM_RANKS, NUM_STEPS = 3, 40
CODECS = ("float32", "int8", "1bit")
NODES = {"flat": [3], "hierarchical": [2, 1], "two_dimensional": [1, 1, 1]}
"""Routes, and the numbers of ranks on their nodes: the last one needs equal ones."""
SCHEDULES = ("every_step", "double_buffering", "block_momentum", "diloco")


def main(part: str) -> None:
    """Print one part of the record. What the runs print goes to the standard error stream."""
    import torchmn

    tree = Path(os.environ["PYTHONPATH"]).resolve()
    if not Path(next(iter(torchmn.__path__))).resolve().is_relative_to(tree):
        raise RuntimeError(f"torchmn comes from {torchmn.__path__} and not from {tree}")
    with redirect_stdout(sys.stderr):
        record = {"runs": runs, "imports": imports_of_run}[part]()
    json.dump(record, sys.stdout)


# ---- runs ----


def in_pairs() -> list[tuple[str, str, str]]:
    """Twelve of the combinations, in which every two values of different axes meet."""
    routes = list(NODES)
    return [
        (schedule, codec, routes[(i + j) % len(routes)])
        for (i, schedule), (j, codec) in product(enumerate(SCHEDULES), enumerate(CODECS))
    ]


def runs() -> Record:
    """By run, the quantities of each rank."""
    import torch

    torch.set_num_threads(1)  # sums of matrix products depend on it
    warnings.simplefilter("ignore")
    return {", ".join(run): _run(*run) for run in in_pairs()}


def _run(schedule: str, codec: str, route: str) -> dict[str, Any]:
    import numpy as np
    import torch

    import torchmn
    from torchmn.testing import run_ranks

    random.seed(0)  # the generators of the process are saved, too
    np.random.seed(0)
    torch.manual_seed(0)
    nodes: list[tuple[str, ...]] = [(f"node{i}",) * n for i, n in enumerate(NODES[route])]
    topology = torchmn.Topology(sum(nodes, ()))
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(
            lambda comm: _train(comm, schedule, codec, Path(folder)),
            NUM_RANKS, name=route, topology=topology, timeout_s=60,
        )  # fmt: skip
        saved = dict(_checkpoints(Path(folder)))
    quantities = {f"rank {rank}, {name}": found for rank, own in enumerate(ranks)
                  for name, found in own.items()}  # fmt: skip
    return {**quantities, **saved}


def _train(comm: Any, schedule: str, codec: str, folder: Path) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import torchmn

    getattr(comm, "route", comm).bucket_bytes = 2000  # several buckets
    model, data = _model(comm.rank), _data()
    adamw = torch.optim.AdamW(model.parameters(), 0.01)
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(
        adamw if schedule == "diloco" else sgd, comm, model,
        schedule=_schedule(schedule), codec=codec,
        max_grad_norm=1.0 if schedule == "every_step" else None,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    # The order comes from a generator of its own: the one of the process belongs to all ranks.
    order = torch.Generator().manual_seed(5)
    whole = DataLoader(TensorDataset(*data), batch_size=12, shuffle=True, generator=order)
    loader = torchmn.scatter_loader(whole, comm)
    checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, "golden")
    objects = {"model": model, "optimizer": optimizer, "rates": rates}
    objects["loader"] = loader.batch_sampler
    losses, collectives = [], _Collectives(comm)
    batches = _again(loader)
    for step in range(1, NUM_STEPS + 1):
        x, target = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(float(loss.detach()))
        collectives.read()
        if step % (NUM_STEPS // 2) == 0:
            comm.barrier()  # the generators of the process are saved: no rank may draw meanwhile
            checkpointer.save(step, objects)
            comm.barrier()
            collectives.read()
    state = dict(_leaves(optimizer.state_dict()))
    checkpointer.finish()
    optimizer.flush()
    comm.barrier()
    collectives.read()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    result = {
        "parameters": {name: _sha(tensor) for name, tensor in tensors.items()},
        "losses": losses,
        "optimizer state": state,
        "collectives": collectives.summary(),
    }
    optimizer.close()
    return result


def _model(rank: int) -> Any:
    """Layers that begin differently on each rank: rank 0 gives its parameters to all."""
    import torch
    from torch import nn

    layers = [nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 24)]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(24, 5))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


def _data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 2, 8, generator=generator)
    return x, torch.randint(5, (96,), generator=generator)


def _schedule(name: str) -> Any:
    from torchmn import schedules  # an attribute of the root: the module itself has moved

    # Blocks of three steps of 12 samples.
    made = {"block_momentum": schedules.BlockMomentum(36), "diloco": schedules.DiLoCo(36)}
    return made.get(name, name)


def _again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class _Collectives:
    """Reads the flight recorder, which forgets, often enough to see every collective."""

    def __init__(self, comm: Any) -> None:
        self._recorder, self._seen = comm.flight_recorder, 0
        self._numbers: list[int] = []
        self._sizes: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def read(self) -> None:
        """Take what is new."""
        for entry in self._recorder.entries():
            if entry.number > self._seen:
                self._seen = entry.number
                self._add(entry)

    def _add(self, entry: Any) -> None:
        import torch

        size = getattr(torch, entry.dtype.removeprefix("torch."), torch.uint8).itemsize
        for length in entry.shape:
            size *= length
        kind = f"{entry.name} in {entry.group}"
        self._numbers.append(entry.number)
        self._sizes.append((entry.group, size))
        self._counts[kind] += 1
        self._bytes[kind] += size

    def summary(self) -> dict[str, Any]:
        """Bytes by kind, and a checksum of all of them in order."""
        if self._numbers != list(range(1, self._seen + 1)):
            raise RuntimeError("the flight recorder has forgotten collectives: read it more often")
        sums = {kind: f"{n} times, {self._bytes[kind]} bytes" for kind, n in self._counts.items()}
        return {**sums, "order and bytes of each": _sha(self._sizes)}


def _checkpoints(folder: Path) -> Iterator[tuple[str, Any]]:
    """Quantities of all checkpoints: tensors by name, and the states that refer to them."""
    for checkpoint in sorted((folder / "golden").glob("step-*")):
        for path in sorted(checkpoint.glob("rank*.safetensors")):
            yield f"checkpoint {checkpoint.name}, {path.name}", _tensors(path.read_bytes())
        for path in sorted(checkpoint.glob("rank*.json")):
            yield (
                f"checkpoint {checkpoint.name}, {path.name}",
                dict(_leaves(json.loads(path.read_text())["objects"])),
            )


def _tensors(content: bytes) -> dict[str, str]:
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = _sha([entry["dtype"], entry["shape"]], content[start + first : start + last])
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a state by their places, tensors as checksums."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "plan":  # of times that were measured, and no bit depends on it
                yield from _leaves(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)) and len(value) < 100:  # random generators have more
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}/{index}")
    else:
        yield path, value if isinstance(value, (str, int, float, type(None))) else _sha(value)


def _sha(value: Any, content: bytes | None = None) -> str:
    """Checksum of a tensor with its dtype and shape, or of other values."""
    if content is None and hasattr(value, "detach"):
        array = value.detach().cpu().contiguous()
        value, content = [str(array.dtype), list(array.shape)], array.numpy().tobytes()
    return hashlib.sha256(repr(value).encode() + (content or b"")).hexdigest()


# ---- imports ----


def imports_of_run() -> list[str]:
    """The packages that ``torchmn run`` imports, but for those of Python."""
    code = (
        "import runpy, sys\n"
        "sys.argv = ['torchmn', 'run', '-n', '1', 'script.py']\n"
        "try: runpy.run_module('torchmn', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(found - sys.stdlib_module_names), sep='\\n')\n"
    )
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text("")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("_")]


if __name__ == "__main__":
    main(sys.argv[1])
