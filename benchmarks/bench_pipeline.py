"""What a pipeline of two ranks gains, compared with one process and torch.distributed.pipelining.

A model of 8 equal layers, 4 on each of two ranks, with one core and one thread each, and 8
micro-batches. A rank waits for the other during one of 9 turns, so that the ideal is 2 * 8 / 9 of
the speed of one process, which trains the whole batch at once. All sides take turns in the same
processes. One process is measured alone, while the other rank sleeps, and also on both at the same
time, which tells what the cores take from one another. And it is measured with the micro-batches of
the pipeline one after another, alone and with a process of half the layers on each core: what that
takes longer is no message and no waiting.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report, run_workers

NUM_ROUNDS = 12
NUM_STEPS = 2
NUM_LAYERS, WIDTH = 8, 512
NUM_MICROBATCHES, SAMPLES = 8, 256
NUM_RANKS = 2
IDEAL = NUM_RANKS * NUM_MICROBATCHES / (NUM_MICROBATCHES + NUM_RANKS - 1)
ALONE, BESIDE = "one process", "one process on each core"
MICRO, MICRO_HALF = "one process by micro-batches", "half the layers by micro-batches on each core"
OURS = {"1f1b": "torchmn 1F1B", "gpipe": "torchmn GPipe"}
PEERS = {"Schedule1F1B": "torch.distributed.pipelining 1F1B",
         "ScheduleGPipe": "torch.distributed.pipelining GPipe"}  # fmt: skip


def worker(folder: str) -> None:
    """Time steps of every side in turn; rank 0 writes seconds per step."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator("flat")
    store = dist.FileStore(str(Path(folder) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        for _ in range(NUM_LAYERS)
    ]
    whole = torch.nn.Sequential(*layers)
    half = NUM_LAYERS // NUM_RANKS
    part = torch.nn.Sequential(*layers[half * comm.rank : half * (comm.rank + 1)])
    x = torch.randn(NUM_MICROBATCHES * SAMPLES, WIDTH)
    t = torch.randn(NUM_MICROBATCHES * SAMPLES, WIDTH)
    loss_fn = torch.nn.functional.mse_loss

    def one_process() -> float:
        loss = loss_fn(whole(x), t)
        loss.backward()
        return float(loss.detach())

    def by_micro_batches(model: torch.nn.Module, is_first: bool = True) -> Callable[[], float]:
        def step() -> float:
            losses = []
            for inputs, targets in zip(
                x.chunk(NUM_MICROBATCHES), t.chunk(NUM_MICROBATCHES), strict=True
            ):
                inputs = inputs if is_first else inputs.detach().requires_grad_()
                loss = loss_fn(model(inputs), targets) / NUM_MICROBATCHES
                loss.backward()
                losses.append(float(loss.detach()))
            return sum(losses)

        return step

    def ours(schedule: str) -> Callable[[], float | None]:
        chain = torchmn.links.MultiNodeChainList(
            comm, num_microbatches=NUM_MICROBATCHES, schedule=schedule
        )
        if comm.rank == 0:
            chain.add_link(part, rank_out=1)
        else:
            chain.add_link(part, rank_in=0)

        def step() -> float | None:
            loss = chain.forward_backward(x, t, loss_fn)
            return None if loss is None else float(loss)

        return step

    def theirs(schedule: str) -> Callable[[], float | None]:
        stage = pipelining.PipelineStage(part, comm.rank, NUM_RANKS, torch.device("cpu"))
        pipeline = getattr(pipelining, schedule)(stage, NUM_MICROBATCHES, loss_fn=loss_fn)

        def step() -> float | None:
            losses: list[torch.Tensor] = []
            if comm.rank == 0:
                pipeline.step(x)
                return None
            pipeline.step(target=t, losses=losses)
            return float(torch.stack(losses).mean())

        return step

    sides: dict[str, Callable[[], float | None]] = {
        ALONE: one_process if comm.rank == 0 else lambda: None,
        BESIDE: one_process,
        MICRO: by_micro_batches(whole) if comm.rank == 0 else lambda: None,
    }
    half_step = by_micro_batches(part, comm.rank == 0)

    def half_of_layers() -> None:
        half_step()  # its loss is another

    sides[MICRO_HALF] = half_of_layers
    sides |= {name: ours(schedule) for schedule, name in OURS.items()}
    sides |= {name: theirs(schedule) for schedule, name in PEERS.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    for number in range(NUM_ROUNDS + 1):
        for side, step in sides.items():
            whole.zero_grad()
            comm.barrier()
            started = time.perf_counter()
            for _ in range(NUM_STEPS):
                loss = step()
            comm.barrier()
            if number:  # the first round warms up
                seconds[side].append((time.perf_counter() - started) / NUM_STEPS)
            if loss is not None:
                losses[side] = loss
    gathered = comm.gather_obj(losses)
    if comm.rank == 0:
        result = {
            "seconds": seconds,
            "losses": {k: v for seen in gathered for k, v in seen.items()},
        }
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    comm.finalize()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        run_workers(__file__, NUM_RANKS, "gloo", folder)
        result = json.loads((Path(folder) / "result.json").read_text())
    seconds, losses = result["seconds"], result["losses"]
    bars: list[Bar] = [median_bar(f"{side}: step", seconds[side], "s") for side in seconds]
    ideal = [taken / IDEAL for taken in seconds[ALONE]]
    for side in OURS.values():
        bars.append(ratio_bar(f"{side}: share of the ideal speed-up", ideal, seconds[side],
                              ">= 0.85"))  # fmt: skip
    for side in PEERS.values():
        bars.append(ratio_bar(f"{side}: share of the ideal speed-up", ideal, seconds[side]))
    beside = [taken / IDEAL for taken in seconds[BESIDE]]
    for side in (*OURS.values(), *PEERS.values()):
        bars.append(ratio_bar(f"{side}: share where both cores are busy", beside, seconds[side]))
    for side in (MICRO, MICRO_HALF):
        share = 1 if side == MICRO else NUM_RANKS
        expected = [taken / share for taken in seconds[ALONE]]
        bars.append(ratio_bar(f"{side}: share of the ideal speed", expected, seconds[side]))
    without_messages = [
        taken * (NUM_MICROBATCHES + NUM_RANKS - 1) / NUM_MICROBATCHES
        for taken in seconds[MICRO_HALF]
    ]
    for side in (*OURS.values(), *PEERS.values()):
        name = f"{side}: share of what these cores do without messages"
        bars.append(ratio_bar(name, without_messages, seconds[side]))
    for ours, theirs in zip(OURS.values(), PEERS.values(), strict=True):
        name = f"{theirs}: its time / that of torchmn"
        bars.append(ratio_bar(name, seconds[theirs], seconds[ours]))
    spread = max(losses.values()) - min(losses.values())
    bars.append(Bar("largest difference of the losses", spread, "", "<= 1e-5", spread <= 1e-5))
    return report("pipeline", bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
