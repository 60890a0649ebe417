"""On a GPU: codec kernels beside a copy of the same bytes, training beside DistributedDataParallel.

Without a GPU it says so and returns 0. The figures go into ``records/gpu.jsonl`` as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from record import RECORDS, Bar, environment, median_bar, ratio_bar, report, run_workers

from torchmn.cluster.units import MiB

ROOT = Path(__file__).parents[1]
NUM_ELEMENTS = 64 * MiB  # 256 MiB of float32: many times any cache
NUM_TURNS = 15
NUM_WARM_UP = 3
NUM_CALLS = 5
COPY_SHARE = ">= 0.7"
NUM_STEPS = 30
SIDES = ("alone", "ddp", "every_step")


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.all.gpu.check import find_facts, reason_not_to_run

    facts = find_facts()
    reason = facts.get("error") or reason_not_to_run(facts)
    if reason is not None:
        print(f"bench-gpu: not run: {reason}.")
        return int("error" in facts)
    bars = codecs()
    for num_ranks in sorted({1, len(facts["gpus"])}):
        bars += training(num_ranks)
    entry = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kind": "bench",
        "environment": environment(),
        "gpu": facts,
        "bars": [asdict(bar) for bar in bars],
    }
    with (RECORDS / "gpu.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    return report("gpu", bars)


# ---- codecs ----


def codecs() -> list[Bar]:
    from torchmn.comm.codecs import ErrorFeedback, Layout, Quantized

    device = torch.device("cuda", 0)
    layout = Layout.of([("w", 0, (NUM_ELEMENTS // 1024, 1024))], torch.float32)
    values = torch.randn(NUM_ELEMENTS, device=device) * 1e-3
    total = torch.zeros_like(values)
    bars: list[Bar] = []
    for bits in (8, 4, 2, 1):
        codec = ErrorFeedback(Quantized(bits))
        encoded = torch.zeros(codec.stripe_nbytes(layout), dtype=torch.uint8, device=device)
        codec.warm_up(layout, device)

        def encode(codec=codec, encoded=encoded) -> None:
            codec.encode_stripe(values, layout, encoded)
            codec.finish(is_valid=True)
            codec.nonfinite.clear()

        def decode(codec=codec, encoded=encoded) -> None:
            codec.decode_stripe(encoded, layout, total, add=True)
            codec.nonfinite.clear()

        # what each must read and write: gradient, residual, new residual, bytes; bytes, sum, sum
        moved = {"encode": 3 * values.nbytes + encoded.nbytes,
                 "decode and add": 2 * values.nbytes + encoded.nbytes,
                 "copy": 2 * values.nbytes}  # fmt: skip
        sides: dict[str, Callable[[], object]] = {
            "encode": encode,
            "decode and add": decode,
            "copy": lambda: total.copy_(values),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(NUM_WARM_UP + NUM_TURNS):
            for side, work in sides.items():
                spent_s = _seconds_on_gpu(work)
                if turn >= NUM_WARM_UP:
                    rates[side].append(moved[side] / spent_s / 1e9)
        bars += [
            ratio_bar(f"{codec.name}: {side}, of the bandwidth of a copy", rates[side],
                      rates["copy"], COPY_SHARE)
            for side in ("encode", "decode and add")
        ]  # fmt: skip
        bars += [median_bar(f"{codec.name}: {side}", rates[side], "GB/s") for side in sides]
    return bars


def _seconds_on_gpu(work: Callable[[], object]) -> float:
    """Of one call, by events around several."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(NUM_CALLS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / NUM_CALLS


# ---- training ----


def training(num_ranks: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        run_workers(str(Path(__file__)), num_ranks, "nccl", folder)
        times = json.loads((Path(folder) / "times.json").read_text())
    gpus = f"{num_ranks} GPU" + "s" * (num_ranks > 1)
    bars = [
        median_bar(f"{gpus}: {side}", [1e3 * s for s in seconds], "ms a step")
        for side, seconds in times.items()
    ]
    name = f"{gpus}: throughput, every_step / ddp"
    return [*bars, ratio_bar(name, times["ddp"], times["every_step"])]


def worker(folder: str) -> None:
    """Time steps of every side in turn; rank 0 writes seconds per step."""
    import torchmn

    comm = torchmn.create_communicator("auto")
    group = comm.process_group
    sides = {side: _make_side(side, comm, group) for side in SIDES}
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = torch.randn(16, 256, 1024, generator=generator).to(comm.device)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(NUM_WARM_UP + NUM_STEPS):
        for side, step in sides.items():
            torch.cuda.synchronize()
            comm.barrier()
            started = time.perf_counter()
            step(tokens)
            torch.cuda.synchronize()
            if index >= NUM_WARM_UP:
                times[side].append(time.perf_counter() - started)
    if comm.rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    comm.barrier()
    comm.finalize()


def _make_side(side: str, comm, group) -> Callable[[torch.Tensor], None]:
    """A Transformer of 76 million parameters in bfloat16 autocast."""
    from torch import nn

    import torchmn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(comm.device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if side == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    elif side == "every_step":
        optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
        raise SystemExit(0)
    raise SystemExit(main())
