"""Batch normalization over 2 workers beside SyncBatchNorm's formula by hand, forward and backward.

torch's SyncBatchNorm needs GPUs. By hand its formula is what it does there, with operations of
torch that are fast on CPUs and collectives of torch.distributed on gloo.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from record import Bar, median_bar, ratio_bar, report, run_workers

SHAPES = {
    "32 x 64 x 16 x 16": (32, 64, 16, 16),
    "16 x 256 x 8 x 8": (16, 256, 8, 8),
    "64 x 256": (64, 256),
}
REPEATS = 300
WARM_UP = 10


def worker(out: str) -> None:
    """Time each layer's forward and backward, in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import torchmn

    torch.set_num_threads(1)
    comm = torchmn.create_communicator(transport="torch")
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    samples: dict[str, dict[str, list[float]]] = {}
    for label, shape in SHAPES.items():
        plain = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
        ours = torchmn.links.convert_batch_norm(plain(shape[1]), comm)
        alone = plain(shape[1])
        by_hand = _by_hand(plain(shape[1]))
        x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
        layers: dict[str, Callable] = {"by hand": by_hand, "ours": ours, "local batches": alone}
        times: dict[str, list[float]] = {name: [] for name in layers}
        for repeat in range(REPEATS + WARM_UP):
            for name, layer in layers.items():
                x.grad = None
                comm.barrier()
                started = time.perf_counter()
                layer(x).backward(dy)
                if repeat >= WARM_UP:
                    times[name].append(time.perf_counter() - started)
        samples[label] = times
    if comm.rank == 0:
        Path(out).write_text(json.dumps(samples))
    comm.finalize()


def _by_hand(layer) -> Callable:
    """torch/nn/modules/_functions.py: gather mean, 1 / deviation and count; reduce two sums."""
    import torch
    import torch.distributed as dist

    def by_channel(values, x):
        return values.view(1, -1, *[1] * (x.dim() - 2))

    class SyncBatchNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            dims = [dim for dim in range(x.dim()) if dim != 1]
            mean = x.mean(dims)
            invstd = ((x - by_channel(mean, x)).square_().mean(dims) + layer.eps).rsqrt_()
            count = torch.full((1,), x.numel() // x.size(1), dtype=mean.dtype)
            row = torch.cat([mean, invstd, count])
            table = torch.empty(dist.get_world_size(), row.numel())
            dist.all_gather(list(table), row)
            means, invstds, counts = table.split([x.size(1), x.size(1), 1], dim=1)
            total = counts.sum()
            mean = (means * counts).sum(0) / total
            variances = invstds.pow(-2) - layer.eps + (means - mean).square_()
            variance = (variances * counts).sum(0) / total
            invstd = (variance + layer.eps).rsqrt_()
            with torch.no_grad():
                layer.running_mean.lerp_(mean, layer.momentum)
                layer.running_var.lerp_(variance * total / (total - 1), layer.momentum)
                layer.num_batches_tracked.add_(1)
            ctx.save_for_backward(x, weight, mean, invstd, total)
            factor = by_channel(invstd * weight, x)
            return (x - by_channel(mean, x)).mul_(factor).add_(by_channel(bias, x))

        @staticmethod
        def backward(ctx, dy):
            x, weight, mean, invstd, total = ctx.saved_tensors
            dims = [dim for dim in range(x.dim()) if dim != 1]
            centered = x - by_channel(mean, x)
            sum_dy, sum_dy_xmu = dy.sum(dims), (dy * centered).sum(dims)
            sums = torch.cat([sum_dy, sum_dy_xmu])
            dist.all_reduce(sums)
            mean_dy, mean_dy_xmu = (sums / total).chunk(2)
            dx = centered.mul_(by_channel(invstd.square() * mean_dy_xmu, x)).neg_()
            dx.add_(dy).sub_(by_channel(mean_dy, x)).mul_(by_channel(invstd * weight, x))
            return dx, sum_dy_xmu * invstd, sum_dy

    return lambda x: SyncBatchNorm.apply(x, layer.weight, layer.bias)


def main() -> int:
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "samples.json")
        run_workers(__file__, 2, "gloo", out)
        samples = json.loads(Path(out).read_text())
    for label, times in samples.items():
        for side in times:
            bars.append(median_bar(f"{label}: {side}", [1e3 * t for t in times[side]], "ms"))
        name = f"{label}: time, ours / by hand"
        bars.append(ratio_bar(name, times["ours"], times["by hand"], "<= 1.0"))
    return report("batch_norm", bars)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        raise SystemExit(main())
