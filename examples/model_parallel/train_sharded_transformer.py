"""Train a small transformer whose parameters are sharded inside of islands, exchanged between them.

    torchmn run -n 4 examples/model_parallel/train_sharded_transformer.py --between 1bit

`fully_shard` of torch shards parameters, gradients and optimizer state over the ranks of an island
(two by default), which gather them layer by layer in every step: a node, or whatever is connected
fast. Between islands each rank exchanges its own shards with its counterparts: gradients of 32, 8
or 1 bits in every step, or parameters every few steps (DiLoCo). The model predicts its own text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchmn
from torchmn import Grid
from torchmn.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import Transformer

LENGTH = 32


class Excerpts(Dataset[Tensor]):
    """Every excerpt of LENGTH + 1 characters of a text."""

    def __init__(self, text: bytes) -> None:
        self._characters = torch.tensor(list(text))

    def __len__(self) -> int:
        return len(self._characters) - LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._characters[index : index + LENGTH + 1]


def shard(model: Transformer, grid: Grid) -> None:
    """Shard each layer, and what is left, over the ranks of an island."""
    from torch.distributed.fsdp import fully_shard

    mesh = grid.device_mesh("shard")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a sharded transformer between islands.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shard", type=int, default=2, help="ranks of an island, which hold one model")
    add("--between", default="1bit", choices=["float32", "int8", "1bit", "diloco"])
    add("--communicator", default="auto", help="route of the mean; auto encodes between hosts only")
    add("--batchsize", type=int, default=16, help="excerpts of a step, over all ranks")
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=60)
    add("--out", default="result", help="folder of the checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    options = parser.parse_args()
    if min(options.shard, options.batchsize, options.layers, options.steps) < 1:
        raise UsageError("--shard, --batchsize, --layers and --steps must be at least 1.")
    return options


def main() -> None:
    options = parse_options()
    comm = torchmn.create_communicator(options.communicator)
    grid = Grid(comm, island=-1, shard=min(options.shard, comm.size))
    torch.manual_seed(0)  # the same parameters before they are sharded, on all ranks of an island
    model = Transformer(options.layers, LENGTH).to(comm.device)
    if grid.shard.size > 1:
        shard(model, grid)
    schedule = torchmn.schedules.DiLoCo(4 * options.batchsize * grid.island.size // comm.size)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.AdamW(model.parameters(), 3e-3),
        grid.island,
        model,
        **({"schedule": schedule} if options.between == "diloco" else {"codec": options.between}),
    )
    data = Excerpts(Path(__file__).read_bytes())
    # fully_shard is data parallel too: all ranks have samples of their own.
    sampler = torchmn.GlobalSampler(data, comm, options.batchsize, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler)
    checkpointer = torchmn.create_multi_node_checkpointer(grid, options.out, "transformer")
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    step = checkpointer.resume(state) if options.resume else 0
    while step < options.steps:
        for excerpts in loader:
            optimizer.zero_grad()
            excerpts = excerpts.to(comm.device)
            scores = model(excerpts[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), excerpts[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 or step == options.steps:
                mean = comm.allreduce(loss.detach(), "mean")
                if comm.rank == 0:
                    print(f"step {step}: loss {float(mean):.6f}", flush=True)
            if step == options.steps:
                break
    optimizer.flush()
    checkpointer.save(step, state)
    checkpointer.finish()
    grid.finalize()
    comm.finalize()


if __name__ == "__main__":
    torchmn.run_main(main)
