"""Which checkpoints stay: the last good ones and the best."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmn.checkpoint.manifest import Manifest
from torchmn.errors import UsageError

DRAFT = ".draft-"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class Best:
    """Keep the checkpoint with the best value, beside the last ones.

    ``key`` is the name in the trainer's observation, such as ``validation/main/accuracy``; in a
    plain loop the value is given to `save`. Raises UsageError: ``mode`` is neither max nor min.
    """

    key: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UsageError(f"mode={self.mode!r} of Best must be 'max' or 'min'.")


def name_of(step: int, taken: Sequence[str]) -> str:
    """The name of the next checkpoint of a step: a repeated one does not touch the first."""
    name = f"step-{step:08d}"
    revisions = [order_of(other)[1] for other in taken if _is_of(other, step)]
    return f"{name}-{max(revisions) + 1}" if revisions else name


def is_checkpoint(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def order_of(name: str) -> tuple[int, int]:
    """(step, revision) of a checkpoint by its name: the newest has the largest."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


def checkpoints_to_delete(
    good: Mapping[str, Manifest],
    bad: Sequence[str],
    newest: str,
    *,
    keep: int,
    best: Best | None,
) -> list[str]:
    """What may go now that ``newest`` is complete.

    ``newest`` stays, the last ``keep`` good ones, the best good one. What is ``bad`` (torn, found
    damaged) counts for nothing and goes when it is older than all that stays: somebody may want to
    look at it. Drafts go at once: nobody writes one now.
    """
    ordered = sorted(good, key=order_of)
    stays = {newest, *ordered[-keep:]}
    if best is not None:
        sign = 1 if best.mode == "max" else -1
        rated = [(sign * m.metric, order_of(n), n) for n, m in good.items() if m.metric is not None]
        stays.update(name for _, _, name in sorted(rated)[-1:])
    oldest = min(order_of(name) for name in stays)
    gone = [name for name in ordered if name not in stays]
    return gone + [name for name in bad if name.startswith(DRAFT) or order_of(name) < oldest]


def _is_of(name: str, step: int) -> bool:
    return is_checkpoint(name) and order_of(name)[0] == step
