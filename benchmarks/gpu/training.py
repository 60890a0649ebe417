"""What the ranks of `make bench-gpu` train: models, and the sides that are compared.

With BENCH_SMOKE=1 in the environment models are tiny and on CPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
IS_SMOKE = os.environ.get("BENCH_SMOKE") == "1"
BLOCK_STEPS = 4 if IS_SMOKE else 100
"""The steps of a block of DiLoCo."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Batch:
    """What a step is given on each rank."""

    x: Tensor
    y: Tensor

    @property
    def num_tokens(self) -> int:
        """Targets: tokens of a text, or images."""
        return self.y.numel()


def _mlp(device: torch.device) -> tuple[nn.Module, Batch]:
    """A tiny one, whose step is the time of the host."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    batch = Batch(torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device))
    return model, batch


def _wide_mlp(device: torch.device) -> tuple[nn.Module, Batch]:
    """302 million parameters and few activations: for memory."""
    width, num_pairs = (32, 2) if IS_SMOKE else (1024, 36)
    layers: list[nn.Module] = []
    for _ in range(num_pairs):
        layers += [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)]
    x = torch.randn(16, width, device=device)
    return nn.Sequential(*layers), Batch(x, torch.randint(width, (16,), device=device))


def _resnet50(device: torch.device) -> tuple[nn.Module, Batch]:
    from models.resnet50 import ImageNetResNet

    width, count, side = (8, 2, 32) if IS_SMOKE else (64, 64, 224)
    x = torch.randn(count, 3, side, side, device=device).contiguous(
        memory_format=torch.channels_last
    )
    model = ImageNetResNet(width=width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, Batch(x, torch.randint(1000, (count,), device=device))


def _gpt(device: torch.device) -> tuple[nn.Module, Batch]:
    from models.gpt import GPT

    if IS_SMOKE:
        model, shape, num_tokens = GPT(64, 32, 1, 32, 2), (2, 32), 64
    else:
        model, shape, num_tokens = GPT(50304, 1024, 12, 768, 12), (4, 1024), 50304
    x = torch.randint(num_tokens, shape, device=device)
    return model, Batch(x, x.roll(-1, 1))


MODELS: dict[str, Callable[[torch.device], tuple[nn.Module, Batch]]] = {
    "mlp": _mlp,
    "wide_mlp": _wide_mlp,
    "resnet50": _resnet50,
    "gpt": _gpt,
}

_DDP = {"ddp": False, "ddp_view": True}
"""Whether gradients are views of DDP's buckets."""
_OPTIONS: dict[str, Callable[[int], Mapping[str, Any]]] = {
    "every_step": lambda samples: {},
    "every_step_view": lambda samples: {"gradient_as_bucket_view": True},
    "int8": lambda samples: {"codec": "int8", "gradient_as_bucket_view": True},
    "1bit": lambda samples: {"codec": "1bit", "gradient_as_bucket_view": True},
    "double_buffering": lambda samples: {"schedule": "double_buffering"},
    "diloco": lambda samples: {"schedule": _diloco(samples, overlap_steps=0)},
    "diloco_int8": lambda samples: {
        "schedule": _diloco(samples, overlap_steps=BLOCK_STEPS // 4),
        "codec": "int8",
    },
}
SIDES = ("alone", *_DDP, *_OPTIONS)


def _diloco(samples_of_step: int, **options: int) -> Any:
    import torchmn

    return torchmn.schedules.DiLoCo(BLOCK_STEPS * samples_of_step, **options)


class Training:
    """A model, its optimizer and its batch, as one side trains them.

    Args:
        side: one of `SIDES`; ``alone`` exchanges nothing.
        name: one of `MODELS`.
        comm: the communicator.
        group: the process group for DistributedDataParallel.
        is_compiled: whether torch.compile compiles the model.
    """

    def __init__(
        self,
        side: str,
        name: str,
        comm: Any,
        group: dist.ProcessGroup | None,
        *,
        is_compiled: bool = False,
    ) -> None:
        import torchmn

        torch.manual_seed(0)
        model, self.batch = MODELS[name](comm.device)
        self.model = model.to(comm.device)
        self.is_text = name == "gpt"
        self.has_blocks = side.startswith("diloco")
        # SGD keeps less state, so that what the exchange needs is a larger part of the memory.
        make = torch.optim.SGD if name == "wide_mlp" else torch.optim.AdamW
        options = {"momentum": 0.9} if name == "wide_mlp" else {"fused": comm.device.type == "cuda"}
        self.optimizer: Any = make(self.model.parameters(), lr=LEARNING_RATE, **options)
        trained: Any = self.model
        if side in _DDP:
            trained = nn.parallel.DistributedDataParallel(
                self.model, process_group=group, gradient_as_bucket_view=_DDP[side]
            )
        elif side != "alone":
            samples = len(self.batch.x) * comm.size
            self.optimizer = torchmn.create_multi_node_optimizer(
                self.optimizer, comm, self.model, **_OPTIONS[side](samples)
            )
        if is_compiled:
            trained = torch.compile(trained, backend="eager" if IS_SMOKE else "inductor")
        self._trained = trained

    def step(self) -> None:
        self.optimizer.zero_grad()
        x, y = self.batch.x, self.batch.y
        with torch.autocast(x.device.type, torch.bfloat16):
            out = self._trained(x)
            loss = nn.functional.cross_entropy(out.flatten(0, -2) if self.is_text else out,
                                               y.flatten())  # fmt: skip
        loss.backward()
        self.optimizer.step()


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
