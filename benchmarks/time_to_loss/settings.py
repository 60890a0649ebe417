"""What is trained, and the candidates from which the settings of each side are chosen.

Nothing is chosen on the text and the seeds of the comparison. `COMPARED` trains on Shakespeare
with seeds 0, 1, ...; learning rates and lengths of blocks come from `TUNED`, another text with a
seed of its own (`choice.py`). All families have the same learning rates to choose from, and DiLoCo
of both libraries the same blocks, and the outer optimizer of the paper or one with less momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NUM_STEPS = 300
"""The loss of DDP after these is the goal; fixed before the first run."""
MAX_STEPS = 2 * NUM_STEPS
"""A run that has not reached the goal by then has not."""
RATE = "100mbit"
FAST_RATE = "10gbit"
"""Where only the loss matters."""
BATCH, LENGTH = 8, 128
"""Sequences of a step over both workers, and their bytes."""
LAYERS, WIDTH, HEADS = 4, 160, 5
WARM_UP_STEPS = 30
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
EVAL_STEPS, FIRST_EVAL_STEP = 10, 100
NUM_VALIDATION = 64
"""Validation sequences, spread over the last tenth of the text."""


Outer = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and the seeds of its runs. DDP sets the goal with ``goal_seed``."""

    name: str
    seeds: tuple[int, ...]
    goal_seed: int


COMPARED = Text(name="tinyshakespeare", seeds=(0, 1, 2, 3, 4), goal_seed=100)
TUNED = Text(name="wikitext2.valid", seeds=(200,), goal_seed=100)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to train. ``options`` are those of its builder in `sides.py`."""

    family: str
    name: str
    build: str
    learning_rate: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """All that a run depends on besides text, seed, goal and link."""
        return {
            **asdict(self),
            "model": [LAYERS, WIDTH, HEADS, LENGTH, BATCH, WARM_UP_STEPS],
            "validation": [EVAL_STEPS, FIRST_EVAL_STEP, NUM_VALIDATION],
        }


def ddp(rate: float, hook: str = "") -> Side:
    """``hook``: of torch's default communication hooks, without ``_compress_hook``."""
    family = f"ddp {hook}".strip()
    name, options = f"{family}, rate {rate:g}", {"hook": hook}
    return Side(family=family, name=name, build="ddp", learning_rate=rate, options=options)


def torchft(rate: float, block: int, outer: Outer | None = None, **streaming: float) -> Side:
    """``block`` is sync_every; ``streaming``: fragments, delay and alpha of torchft's DiLoCo."""
    options = {"block": block, "outer": outer or PAPER, "fragments": 1, "delay": 0, "alpha": 0.0}
    mode = (", streaming" if streaming else "") + (f", momentum {outer[1]:g}" if outer else "")
    return Side(
        family="torchft DiLoCo",
        name=f"torchft DiLoCo{mode}, {block} steps, rate {rate:g}",
        build="torchft",
        learning_rate=rate,
        options={**options, **streaming},
    )


def gradients(rate: float, codec: str) -> Side:
    """Gradients at every step."""
    return Side(
        family="torchmn gradients",
        name=f"torchmn gradients, {codec}, rate {rate:g}",
        build="gradients",
        learning_rate=rate,
        options={"codec": codec, "schedule": "every_step"},
    )


def diloco(rate: float, block: int, codec: str) -> Side:
    """DiLoCo in two fragments, each under way during 4 steps."""
    return _diloco("streaming", rate, block, codec, outer=PAPER, fragments=2, overlap=4)


def whole_diloco(rate: float, block: int, codec: str, *, is_late: bool = False) -> Side:
    """DiLoCo as torchft's without streaming, with a codec.

    It waits for each exchange, or, if ``is_late``, has it under way during the next step.
    """
    mode, overlap = ("1 step late", 1) if is_late else ("blocking", 0)
    return _diloco(mode, rate, block, codec, outer=RECIPE, fragments=1, overlap=overlap)


def eager_diloco(rate: float, block: int, codec: str) -> Side:
    """`DiLoCo.recommended`: the whole block under way during 6 steps."""
    options = {"outer": RECIPE, "fragments": 1, "overlap": 6, "eager": True}
    return _diloco("recommended", rate, block, codec, **options)


def _diloco(mode: str, rate: float, block: int, codec: str, **options: Any) -> Side:
    return Side(
        family="torchmn DiLoCo",
        name=f"torchmn DiLoCo, {mode} {codec}, {block} steps, rate {rate:g}",
        build="diloco",
        learning_rate=rate,
        options={"block": block, "codec": codec, **options},
    )


RECIPE = (0.7, 0.7)
"""Those of `DiLoCo.recommended`, chosen for images (``docs/explain/recipes.md``)."""
PAPER = (0.7, 0.9)
"""Rate and Nesterov momentum of the outer optimizer, of the paper and torchft's documentation."""
RATES = (5e-4, 1e-3, 2e-3)
"""On `TUNED` DDP has a higher loss at 2e-3 than at 1e-3."""
BLOCKS = (10, 20, 40)
DDP = tuple(ddp(rate) for rate in RATES)
CANDIDATES: tuple[Side, ...] = (
    *(torchft(rate, block) for rate in RATES for block in BLOCKS),
    *(torchft(rate, 20, fragments=2, delay=4, alpha=0.5) for rate in RATES),
    *(gradients(rate, codec) for rate in RATES for codec in ("int4", "1bit")),
    *(diloco(rate, block, "int8") for rate in RATES for block in BLOCKS),
    # Added after the first seed of the comparison, for both systems: another outer momentum.
    *(torchft(rate, block, RECIPE) for rate in RATES[:2] for block in BLOCKS[1:]),
    *(eager_diloco(rate, block, "int8") for rate in RATES[:2] for block in BLOCKS[1:]),
    # And after the third, so that both systems have it with and without overlap.
    *(torchft(rate, 20, RECIPE, fragments=2, delay=4, alpha=0.5) for rate in RATES[:2]),
    *(torchft(rate, 10, RECIPE) for rate in RATES[:2]),
    *(whole_diloco(rate, block, "int8") for rate in RATES[:2] for block in BLOCKS[1:]),
    *(whole_diloco(rate, block, "int4") for rate in RATES[:2] for block in BLOCKS[:2]),
    *(whole_diloco(rate, 20, "int4", is_late=True) for rate in RATES[:2]),
)
OURS = ("torchmn gradients", "torchmn DiLoCo")
"""The families of which the faster one on `TUNED` has the limits."""
LIMITS = {"ddp": ">= 5", "ddp fp16": None, "torchft DiLoCo": ">= 1.2"}
"""How many times faster it is to be."""
