"""The compared codecs and schedules, with the names of `bench_exchange.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

BASELINE = "every step"
BATCH = 32  # samples of one worker in one step, as in bench_exchange
BLOCK_STEPS = 16  # steps of a block, for any batch size
OVERLAP_STEPS = 6
CODECS = ("float16", "bfloat16", "int8", "int4", "int2", "1bit", "power_sgd")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One codec with one schedule.

    ``options`` are the schedule's own; the length of its blocks is given in steps.
    ``learning_rate_factor`` multiplies the learning rate that was tuned for the baseline, where a
    schedule takes larger steps with the same rate; ``rate_of`` is the schedule of `choice.py` for
    which it was chosen. ``note`` is printed after the name. An asynchronous side has no limits
    except on MNIST.
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
    name: str, schedule: str, factor: Fraction | None, codec: str | None, is_overlapped: bool
) -> Side:
    options = {"overlap_steps": OVERLAP_STEPS} if is_overlapped else {}
    return Side(
        name=f"{name}{f' {codec}' if codec else ''}{', overlapped' if is_overlapped else ''}",
        schedule=schedule,
        codec=codec,
        options=options,
        block_steps=BLOCK_STEPS,
        learning_rate_factor=float(factor or 1),
        rate_of=name if factor else None,
        note=f"rate x {factor}" if factor else "",
    )


_ALL = (
    Side(name=BASELINE),
    *(Side(name=f"every step {codec}", codec=codec) for codec in CODECS),
    Side(name="double buffering", schedule="double_buffering"),
    *(
        Side(name=f"double buffering {codec}", schedule="double_buffering", codec=codec)
        for codec in ("int8", "1bit")
    ),
    *(
        _blocks(name, schedule, factor, codec, is_overlapped)
        for name, schedule, factor in (
            ("periodic average", "periodic_average", None),
            # Chosen on separate images and seeds, see `choice.py`: the full rate, although the
            # update of a block is larger than the mean update of the workers.
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
