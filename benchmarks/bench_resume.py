"""Does the training loss jump when a run resumes with another number of workers? Real digits.

For every seed one run is uninterrupted; others are saved in the middle of an epoch and a block and
resume with more and with fewer workers, on the same samples in the same order. The jump is the
difference between the mean losses of the next steps of both runs, relative to the spread of that
mean over seeds. The jump with only the model loaded is reported without a limit.

The network has no batch normalization, whose batches depend on the number of workers.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import Bar, report
from torch import nn

from torchmn import GlobalSampler, create_multi_node_optimizer
from torchmn.comm import Communicator
from torchmn.exchange.schedules import BlockMomentum, DiLoCo, EveryStep, PeriodicAverage, Warmup
from torchmn.testing import run_ranks

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))
sys.path.insert(0, str(_ROOT / "examples"))
from datasets import load_images  # noqa: E402
from tests.contracts.suites.resume_contracts import described  # noqa: E402

GLOBAL_BATCH = 48
NUM_IMAGES = 1392  # 29 global batches
STEPS_BEFORE = 70
STEPS_AFTER = 15
CHANGES = ((2, 3), (3, 2), (1, 4))
NUM_SEEDS = 5


@dataclass(frozen=True)
class Way:
    """One way to train: blocks of 6 and of 4 steps, so that the save is in the middle of one."""

    schedule: Callable[[], Any]
    codec: str | None = None


WAYS = {
    "every step, float32": Way(lambda: "every_step"),
    "every step, int8": Way(lambda: "every_step", "int8"),
    "every step, 1bit": Way(lambda: "every_step", "1bit"),
    "every step, power_sgd": Way(lambda: "every_step", "power_sgd"),
    "float32, then 1bit": Way(lambda: Warmup(20 * GLOBAL_BATCH, EveryStep()), "1bit"),
    "double buffering, int8": Way(lambda: "double_buffering", "int8"),
    "periodic average": Way(lambda: PeriodicAverage(6 * GLOBAL_BATCH)),
    "block momentum, 1bit": Way(lambda: BlockMomentum(6 * GLOBAL_BATCH), "1bit"),
    "diloco": Way(lambda: DiLoCo(6 * GLOBAL_BATCH)),
    "diloco, overlap, fragments, int8": Way(
        lambda: DiLoCo(8 * GLOBAL_BATCH, overlap_steps=2, num_fragments=2), "int8"
    ),
}


Losses = list[float]
States = list[dict[str, Any]]


def train(
    way: Way,
    seed: int,
    size: int,
    num_steps: int,
    states: States | None = None,
    *,
    with_optimizer: bool = True,
) -> tuple[Losses, States]:
    """The mean loss of every step, and what all ranks save after STEPS_BEFORE."""
    images, labels = _digits()

    def body(comm: Communicator) -> tuple[Losses, dict[str, Any]]:
        comm.route.bucket_bytes = 20_000
        model = _network(seed)
        optimizer = create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), comm, model,
            schedule=way.schedule(), codec=way.codec, weight="samples",
        )  # fmt: skip
        sampler = GlobalSampler(NUM_IMAGES, comm, GLOBAL_BATCH, seed=seed)
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
        if states is not None:
            model.load_state_dict(states[0]["model"])
            sampler.load_state_dict(states[0]["sampler"])
        if states is not None and with_optimizer:
            all_states = [state["optimizer"] for state in states]
            optimizer.load_state_dict(described(optimizer.reshard_state_dict(all_states, comm)))
        losses: Losses = []
        saved: dict[str, Any] = {}
        while len(losses) < num_steps:
            for indices in sampler:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
                loss.backward()
                optimizer.step()
                losses.append(float(comm.allreduce(loss.detach().reshape(1), "mean")))
                if len(losses) == STEPS_BEFORE:
                    saved = described({name: each.state_dict() for name, each in objects.items()})
                if len(losses) == num_steps:
                    break
        return losses, saved

    results = run_ranks(body, size, timeout_s=60)
    return results[0][0], [state for _, state in results]


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_images("digits").train.tensors
    return images[:NUM_IMAGES].flatten(1), labels[:NUM_IMAGES]


def _network(seed: int) -> nn.Sequential:
    """Initialized from a separate generator, because ranks are threads with a common one."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            bound = (96 if len(parameter) == 10 else 64) ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
    return model


@dataclass(frozen=True)
class Measured:
    """Mean losses of the steps after the interruption, by seed."""

    straight: list[float]
    resumed: list[float]
    model_only: list[float]

    @property
    def spread(self) -> float:
        """The range over seeds."""
        return max(self.straight) - min(self.straight)

    @property
    def jumps(self) -> list[float]:
        """The distance of each run from the uninterrupted one of its seed, in spreads."""
        pairs = zip(self.resumed, self.straight, strict=True)
        return [abs(mine - theirs) / self.spread for mine, theirs in pairs]

    @property
    def jumps_of_model_only(self) -> list[float]:
        """The same with only the model loaded."""
        pairs = zip(self.model_only, self.straight, strict=True)
        return [abs(mine - theirs) / self.spread for mine, theirs in pairs]


def measure(way: Way, old: int, new: int, num_seeds: int = NUM_SEEDS) -> Measured:
    """All seeds of one way to train and one change of the number of workers."""
    straight, resumed, model_only = [], [], []
    for seed in range(num_seeds):
        whole, states = train(way, seed, old, STEPS_BEFORE + STEPS_AFTER)
        after, _ = train(way, seed, new, STEPS_AFTER, states)
        plain, _ = train(way, seed, new, STEPS_AFTER, states, with_optimizer=False)
        straight.append(statistics.mean(whole[STEPS_BEFORE:]))
        resumed.append(statistics.mean(after))
        model_only.append(statistics.mean(plain))
    return Measured(straight, resumed, model_only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bars: list[Bar] = []
    for name, way in WAYS.items():
        for old, new in CHANGES:
            found = measure(way, old, new, arguments.seeds)
            jump = max(found.jumps)
            bars.append(
                Bar(f"{name}: {old} -> {new} workers, largest jump", jump, "spreads", "<= 1",
                    jump <= 1, found.jumps)
            )  # fmt: skip
            lost = found.jumps_of_model_only
            bars.append(Bar("    only the model loaded", max(lost), "spreads", samples=lost))
            print(f"{bars[-2].bar}: {jump:.3f}; only the model: {max(lost):.3f}", file=sys.stderr)
    return report("resume", bars)


if __name__ == "__main__":
    sys.exit(main())
