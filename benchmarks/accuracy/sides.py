"""What is compared: codecs and schedules, by the names that `bench_exchange.py` has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

BASELINE = "every step"
BATCH = 32  # samples of one worker in one step, as bench_exchange has it
BLOCK_STEPS = 16  # a block has so many steps of both workers, whatever the batch of the task
OVERLAP_STEPS = 6
CODECS = ("float16", "bfloat16", "int8", "int4", "int2", "1bit", "power_sgd")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One codec with one schedule.

    ``options`` are the schedule's own; the length of its blocks is given in steps.
    ``learning_rate_factor`` multiplies the learning rate that was tuned for the baseline, where a
    schedule moves further with the same one; ``rate_of`` is the schedule of `choice.py` for which
    it was chosen. ``note`` stands beside the name in the table. An asynchronous side is held to no
    limit but MNIST's.
    """

    name: str
    schedule: str = "every_step"
    codec: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    block_steps: int | None = None
    learning_rate_factor: float = 1.0
    rate_of: str | None = None
    note: str = ""
    is_asynchronous: bool = False


def _blocks(
    words: str, schedule: str, factor: Fraction | None, codec: str | None, is_overlapped: bool
) -> Side:
    options = {"overlap_steps": OVERLAP_STEPS} if is_overlapped else {}
    return Side(
        name=f"{words}{f' {codec}' if codec else ''}{', overlapped' if is_overlapped else ''}",
        schedule=schedule,
        codec=codec,
        options=options,
        block_steps=BLOCK_STEPS,
        learning_rate_factor=float(factor or 1),
        rate_of=words if factor else None,
        note=f"rate x {factor}" if factor else "",
    )


_ALL = (
    Side(name=BASELINE),
    *(Side(name=f"every step {codec}", codec=codec) for codec in CODECS),
    Side(name="next forward", schedule="every_step_next_forward"),
    *(
        Side(name=f"next forward {codec}", schedule="every_step_next_forward", codec=codec)
        for codec in ("int8", "1bit")
    ),
    Side(name="double buffering", schedule="double_buffering"),
    *(
        Side(name=f"double buffering {codec}", schedule="double_buffering", codec=codec)
        for codec in ("int8", "1bit")
    ),
    *(
        _blocks(words, schedule, factor, codec, is_overlapped)
        for words, schedule, factor in (
            ("periodic average", "periodic_average", None),
            # Chosen on images and seeds of their own, see `choice.py`: the whole rate, although a
            # block moves by more than the mean movement of the workers.
            ("block momentum", "block_momentum", Fraction(1)),
            ("DiLoCo", "diloco", Fraction(1)),
        )
        for codec in (None, "int8")
        for is_overlapped in (False, True)
    ),
    Side(
        name="parameter server",
        schedule="parameter_server",
        learning_rate_factor=1 / 2,  # each of two gradients is an update
        note="rate / 2",
        is_asynchronous=True,
    ),
)
SIDES = {side.name: side for side in _ALL}
