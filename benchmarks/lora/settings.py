"""The task, and the ways to train that are compared; fixed before the comparison was run.

A base model was trained on one text (`worker.pretrain`) and is fine-tuned on another one, a play:
adapters of rank 16 on all linear layers, as peft's documentation recommends, and a batch of one
sequence per worker, with which a step takes some 100 ms of a core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


LEARNING_RATE = 2e-3
SIDES: tuple[Side, ...] = (
    Side(name=NO_EXCHANGE, build="alone", learning_rate=LEARNING_RATE),
    Side(name=BASELINE, build="ddp", learning_rate=LEARNING_RATE),
    Side(name="DDP, fp16 hook", build="ddp", learning_rate=LEARNING_RATE, options={"hook": "fp16"}),
    Side(name="every step, float32", build="torchmn", learning_rate=LEARNING_RATE),
    Side(
        name="every step, int8",
        build="torchmn",
        learning_rate=LEARNING_RATE,
        options={"codec": "int8"},
    ),
    diloco(20, LEARNING_RATE),
    diloco(20, LEARNING_RATE, overlap=1),
)
CANDIDATES: tuple[Side, ...] = tuple(
    Side(
        name=f"{side.name}, rate {rate:g}",
        build=side.build,
        learning_rate=rate,
        options=side.options,
    )
    for rate in (1e-3, 2e-3, 4e-3)
    for side in (SIDES[1], diloco(10, rate), diloco(20, rate))
)
"""Of ``--choose``: the learning rate of DDP with the lowest loss is that of all sides."""
