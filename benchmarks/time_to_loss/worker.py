"""A rank: trains until the validation loss of both ranks' models is at or below a goal."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from time_to_loss import settings
from time_to_loss.settings import BATCH, LENGTH, NUM_VALIDATION, Side


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the ranks are asked for. ``goal`` 0 trains all of the steps."""

    side: dict[str, Any]
    text: str
    seed: int
    goal: float
    max_steps: int


def serve() -> None:
    """Be ready, train one side as a line of the input says, and print the run as JSON."""
    torch.set_num_threads(1)
    os.environ["OWN_ADDRESS"] = socket.gethostbyname(socket.gethostname())
    dist.init_process_group("gloo")
    print(json.dumps("ready"), flush=True)
    order, busy = Order(**json.loads(sys.stdin.readline())), time.process_time()
    try:
        reply = train(order)
    except ImportError as error:  # of a peer
        reply = {"failed": f"{type(error).__name__}: {error}"}
    reply["busy_s"] = time.process_time() - busy
    print(json.dumps(reply), flush=True)
    os._exit(0)  # process groups of peers would wait for each other in an orderly exit


def train(order: Order) -> dict[str, Any]:
    """The curve: steps, seconds on the clock and loss of each validation.

    ``processor_seconds`` are those of all threads of this rank, in the same time.
    """
    from time_to_loss.sides import build

    side = Side(**order.side)
    train_text, validation = load(order.text)
    model = make_model(order.seed)
    inner = torch.optim.AdamW(
        _groups(model), side.learning_rate, betas=settings.BETAS, weight_decay=0.0
    )
    offsets = torch.randint(
        len(train_text) - LENGTH,
        (settings.MAX_STEPS, BATCH),
        generator=torch.Generator().manual_seed(order.seed),
    )
    own = slice(dist.get_rank(), None, dist.get_world_size())
    training = build(side, model, inner)
    curve: list[tuple[int, float, float]] = []
    seconds, busy = 0.0, 0.0
    began, busy_before = start_clock(), time.process_time()
    for step in range(1, order.max_steps + 1):
        for group in inner.param_groups:
            group["lr"] = side.learning_rate * min(1.0, step / settings.WARM_UP_STEPS)
        batch = torch.stack([train_text[at : at + LENGTH + 1] for at in offsets[step - 1, own]])
        training.optimizer.zero_grad()
        loss_of(training.model, batch).backward()
        training.optimizer.step()
        if is_validated(step) or step == order.max_steps:
            training.wait()
            dist.barrier()
            seconds += time.perf_counter() - began
            busy += time.process_time() - busy_before
            curve.append((step, seconds, validate(model, validation)))
            if curve[-1][2] <= order.goal:
                break
            began, busy_before = start_clock(), time.process_time()
    return {
        "curve": curve,
        "processor_seconds": busy,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def is_validated(step: int) -> bool:
    return step >= settings.FIRST_EVAL_STEP and step % settings.EVAL_STEPS == 0


def start_clock() -> float:
    """The time when both ranks are here. *Collective.*"""
    dist.barrier()
    return time.perf_counter()


def make_model(seed: int) -> nn.Module:
    from models import GPT

    torch.manual_seed(seed)
    return GPT(256, LENGTH, settings.LAYERS, settings.WIDTH, settings.HEADS)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": settings.WEIGHT_DECAY}, {"params": others}]


def load(name: str) -> tuple[Tensor, Tensor]:
    """The first nine tenths of a text, and ``(sequences, LENGTH + 1)`` of the rest."""
    path = Path(os.environ["TORCHMN_TEST_DATA"]) / "text-lm" / f"{name}.txt.gz"
    text = torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8).long()
    border = len(text) * 9 // 10
    rest = text[border:]
    stride = (len(rest) - LENGTH - 1) // (NUM_VALIDATION - 1)
    starts = [index * stride for index in range(NUM_VALIDATION)]
    return text[:border], torch.stack([rest[at : at + LENGTH + 1] for at in starts])


def loss_of(model: nn.Module, excerpts: Tensor) -> Tensor:
    """Mean cross-entropy of each byte after the first of excerpts ``(batch, LENGTH + 1)``."""
    return cross_entropy(model(excerpts[:, :-1]).flatten(0, 1), excerpts[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, excerpts: Tensor) -> float:
    """The larger of both ranks' losses, each with its own parameters. *Collective.*"""
    model.eval()
    losses = torch.stack([loss_of(model, part) for part in excerpts.split(32)])
    model.train()
    worst = losses.mean()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)
