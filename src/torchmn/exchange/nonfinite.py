"""Gradients that are not finite: the report and the log, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NonfiniteGradients:
    """Gradients of one step, or movements of one block, that were not finite. Same on all ranks."""

    step: int
    by_rank: dict[int, list[str]] = field(default_factory=dict)
    """The parameters by the rank whose gradient it was; empty if only the sum overflowed."""
    in_sum: list[str] = field(default_factory=list)
    what: str = "gradients"
    is_elsewhere: bool = False
    """Whether all of them belong to parts of the model that other ranks hold."""

    def __str__(self) -> str:
        ranks = "; ".join(
            f"rank {rank}: {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for rank, names in self.by_rank.items()
        )
        if self.is_elsewhere:
            held = f"{self.what} of a part of the model that another rank holds"
            return f"at step {self.step} {held} were not finite"
        return f"at step {self.step} {self.what} were not finite ({ranks or 'in the sum only'})"


class NonfiniteLog:
    """What was not finite in the means so far, and in the current ones."""

    def __init__(self) -> None:
        self.current: NonfiniteGradients | None = None
        """In the current means; None once it was dealt with."""
        self.problems: list[NonfiniteGradients] = []

    def record(self, problem: NonfiniteGradients | None) -> NonfiniteGradients | None:
        """Make this the problem of the current means."""
        self.current = problem
        if problem is not None:
            self.problems.append(problem)
        return problem

    def num_in_a_row(self) -> int:
        """How many problems there were up to the last step with nothing else between them."""
        count = 0
        for newer, older in zip(self.problems[::-1], self.problems[-2::-1], strict=False):
            if newer.step - older.step > 1:
                break
            count += 1
        return count + 1 if self.problems else 0

    def take(self) -> NonfiniteGradients | None:
        """The problem of the current means, which is then dealt with."""
        problem, self.current = self.current, None
        return problem
