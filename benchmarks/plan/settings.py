"""The settings of bench_plan.py: which were measured to know the costs, and which are predicted."""

from __future__ import annotations

from dataclasses import dataclass

from exchange.table import BATCH, BLOCK_STEPS, SIDES

from torchmn.planning.description import Setting


@dataclass(frozen=True, kw_only=True)
class Case:
    """A side of `exchange.table` on hosts with one worker and one core each.

    ``is_fitted``: its measured step was used to find the costs of an exchange.
    """

    num_hosts: int
    rate: str
    side: str
    is_fitted: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.num_hosts} hosts, {self.rate}, {self.side}"

    def setting(self, num_cores: int) -> Setting:
        """For the model. ``num_cores`` of this machine, in turn given to the hosts."""
        side = SIDES[self.side]
        schedule = side.options.get("schedule") or "every_step"
        is_block = side.build == "torchmn blocks"
        more: dict[str, int] = dict(side.options.get("schedule_options") or {})  # type: ignore[call-overload]
        return Setting(
            hosts=self.num_hosts,
            cores_per_rank=min(1.0, num_cores / self.num_hosts),
            rate=self.rate,
            schedule="periodic_average" if is_block else str(schedule),
            codec=str(side.options.get("codec") or "float32"),
            samples=BATCH,
            block_steps=BLOCK_STEPS,
            overlap_steps=more.get("overlap_steps", 0),
        )


def _cases(num_hosts: int, rate: str, *sides: str, fitted: tuple[str, ...] = ()) -> list[Case]:
    return [
        Case(num_hosts=num_hosts, rate=rate, side=side, is_fitted=side in fitted) for side in sides
    ]


CASES = [
    *_cases(1, "10gbit", "every step"),
    *_cases(2, "10gbit", "every step", "every step 1bit", "every step int8",
            fitted=("every step", "every step 1bit")),
    *_cases(2, "1gbit", "every step", "every step int8", "every step 1bit",
            "periodic average", fitted=("every step",)),
    *_cases(2, "100mbit", "every step int8", "every step 1bit",
            "periodic average int8, overlapped"),
    *_cases(4, "10gbit", "every step"),
    *_cases(4, "1gbit", "every step", "every step int8", "periodic average"),
    *_cases(4, "100mbit", "every step int8", "every step 1bit"),
]  # fmt: skip
