"""The task, and the ways to train that are compared; fixed before the comparison was run.

A base model was trained on one text (`worker.pretrain`) and is fine-tuned on another one, a play:
adapters of rank 16 on all linear layers, as peft's documentation recommends, and a batch of one
sequence per worker, with which a step takes some 100 ms of a core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

RATE = "100mbit"
PRETRAINED_ON, TUNED_ON = "wikitext2.valid", "tinyshakespeare"
"""Texts. Settings are chosen on the first half of the second one and compared on the other half."""
VOCABULARY, WIDTH, FEED_FORWARD, LAYERS, HEADS = 256, 256, 688, 8, 8
ADAPTER_RANK = 16
LENGTH = 128
BATCH = 2
"""Sequences of a step over both workers."""
TURN_STEPS = 20
NUM_TURNS = 8
"""All sides are compared after these times `TURN_STEPS` steps."""
WARM_UP_STEPS = 20
BASELINE, NO_EXCHANGE = "DDP", "no exchange"
PRETRAINING_STEPS, PRETRAINING_BATCH = 120, 8
NUM_VALIDATION = 64
"""Validation sequences, spread over the last tenth of each half."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to train. ``options`` are those of its builder in `worker.py`."""

    name: str
    build: str
    learning_rate: float
    options: Mapping[str, Any] = field(default_factory=dict)


def diloco(block: int, rate: float, overlap: int = 0) -> Side:
    """DiLoCo with ``DiLoCo.recommended``'s outer optimizer."""
    late = f", {overlap} step late" if overlap else ""
    return Side(
        name=f"DiLoCo int8, {block} steps{late}",
        build="torchmn",
        learning_rate=rate,
        options={"codec": "int8", "block": block, "overlap": overlap},
    )


def every_step(codec: str, schedule: str = "every_step") -> Side:
    """Gradients at each step."""
    return Side(
        name=f"{schedule.replace('_', ' ')}, {codec}",
        build="torchmn",
        learning_rate=LEARNING_RATE,
        options={"codec": codec, "schedule": schedule},
    )


LEARNING_RATE, RATE_OF_BLOCKS, BLOCK = 2e-3, 1e-3, 20
"""Those of the candidates below with the lowest losses: 2.586 of DDP and 2.631 of DiLoCo."""
SIDES: tuple[Side, ...] = (
    Side(name=NO_EXCHANGE, build="alone", learning_rate=LEARNING_RATE),
    Side(name=BASELINE, build="ddp", learning_rate=LEARNING_RATE),
    Side(name="DDP, fp16 hook", build="ddp", learning_rate=LEARNING_RATE, options={"hook": "fp16"}),
    every_step("float32"),
    every_step("int8"),
    every_step("int4"),
    every_step("int8", "double_buffering"),
    diloco(BLOCK, RATE_OF_BLOCKS),
    diloco(BLOCK, RATE_OF_BLOCKS, overlap=1),
)
CANDIDATES: tuple[Side, ...] = (
    *(
        Side(name=f"{BASELINE}, rate {rate:g}", build="ddp", learning_rate=rate)
        for rate in (1e-3, 2e-3, 4e-3)
    ),
    *(
        replace(side, name=f"{side.name}, rate {side.learning_rate:g}")
        for rate in (5e-4, 1e-3, 2e-3)
        for side in (diloco(5, rate), diloco(10, rate), diloco(20, rate))
    ),
)
"""Of ``--choose``: the rates of DDP, and the rates and blocks of DiLoCo; the lowest loss counts."""
