"""What is known of each user script: what it shows, and its expected outcome.

A script is a function of a `Worker`, registered by one line above it:

    @script("Clip gradients by their global norm")
    def clip_by_norm(worker: Worker) -> nn.Module:
        ...

It must give what one process gives that trains on the whole batch, for every schedule of
`SCHEDULES` and for every number of ranks of `WORLD_SIZES`, unless it declares another outcome.
What a script returns and what it logs is compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .worker import Worker

WORLD_SIZES = (1, 2)
SCHEDULES = ("every_step", "auto")
TOLERANCE = 1e-12  # relative to 1 plus the value, in float64

Program = Callable[[Worker], Any]


@dataclass(frozen=True)
class Exact:
    """The numbers of one process on the whole batch."""


@dataclass(frozen=True)
class Refused:
    """An error of torchmn with a cure, on every rank. ``text`` is part of its message."""

    text: str
    cure: str  # for the page: what to write in its place
    on_one_rank: bool = False  # whether one rank refuses it too; otherwise it must be exact there


Outcome = Exact | Refused


@dataclass(frozen=True, kw_only=True, eq=False)
class Script:
    """One row of docs/reference/works-with.md."""

    title: str
    program: Program
    # What one process runs for comparison: the program itself but for own definitions.
    reference: Program
    # Empty, or what the numbers mean where one process on the whole batch is no comparison.
    own_definition: str
    tolerance: float
    why_tolerance: str
    outcomes: Mapping[str, Outcome]
    is_slow: bool

    @property
    def name(self) -> str:
        """The function's."""
        return self.program.__name__

    def outcome(self, schedule: str, world_size: int) -> Outcome:
        """The expected outcome."""
        outcome = self.outcomes.get(schedule, Exact())
        if world_size == 1 and isinstance(outcome, Refused) and not outcome.on_one_rank:
            return Exact()
        return outcome


def refused(text: str, cure: str, *, on_one_rank: bool = False) -> dict[str, Outcome]:
    """A refusal under every schedule."""
    return dict.fromkeys(SCHEDULES, Refused(text, cure, on_one_rank))


SCRIPTS: dict[str, list[Script]] = {}  # by the module that holds them


def script(
    title: str,
    *,
    reference: Program | None = None,
    own_definition: str = "",
    tolerance: float = TOLERANCE,
    why_tolerance: str = "",
    is_slow: bool = False,
    **outcomes: Outcome,
) -> Callable[[Program], Program]:
    """Register a script. ``outcomes`` are by schedule; what is not named must be exact."""
    unknown = set(outcomes) - set(SCHEDULES)
    if unknown:
        raise ValueError(f"{title}: no such schedule: {', '.join(sorted(unknown))}")
    if (tolerance > TOLERANCE) != bool(why_tolerance):
        raise ValueError(f"{title}: a tolerance of its own needs a reason, and only that one.")
    if (reference is None) != (own_definition == ""):
        raise ValueError(f"{title}: a reference of its own needs a definition, and only that one.")

    def register(program: Program) -> Program:
        SCRIPTS.setdefault(program.__module__, []).append(
            Script(
                title=title,
                program=program,
                reference=reference or program,
                own_definition=own_definition,
                tolerance=tolerance,
                why_tolerance=why_tolerance,
                outcomes=outcomes,
                is_slow=is_slow,
            )
        )
        return program

    return register
