"""Which checkpoints are kept: the last valid ones and the best."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmn.checkpoint.manifest import Manifest
from torchmn.errors import UsageError

TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class Best:
    """Keep the checkpoint with the best value, in addition to the last ones.

    ``key`` is the name in the trainer's observation, such as ``validation/main/accuracy``; in a
    plain loop the value is given to `save`. Raises UsageError: ``mode`` is neither max nor min.

    Example:
        >>> Best("validation/main/accuracy", "max")
        Best(key='validation/main/accuracy', mode='max')
    """

    key: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UsageError(f"mode={self.mode!r} of Best must be 'max' or 'min'.")


def name_of(step: int, taken: Sequence[str]) -> str:
    """The name of the next checkpoint, which is the newest: it replaces none and follows all.

    After one of this step or a later one, of a training that has begun again, the revision grows.
    """
    revision, newest_step = max(map(order_of, filter(is_checkpoint, taken)), default=(1, -1))
    if step <= newest_step:
        revision += 1
    return f"step-{step:08d}" + (f"-{revision}" if revision > 1 else "")


def is_checkpoint(name: str) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def order_of(name: str) -> tuple[int, int]:
    """(revision, step) of a checkpoint by its name: the one that was saved last has the largest."""
    found = _NAME.fullmatch(name)
    return (int(found[2] or 1), int(found[1])) if found else (0, -1)


def checkpoints_to_delete(
    good: Mapping[str, Manifest],
    bad: Sequence[str],
    newest: str,
    *,
    keep: int,
    best: Best | None,
) -> list[str]:
    """The checkpoints to delete once ``newest`` is complete.

    Kept are ``newest``, the last ``keep`` valid ones and the best valid one. A ``bad`` one
    (incomplete or damaged) does not count, and is deleted when it is older than all that are kept,
    so that it can be examined. Temporary ones are deleted at once: none is being written now.
    """
    ordered = sorted(good, key=order_of)
    kept = {newest, *ordered[-keep:]}
    if best is not None:
        sign = 1 if best.mode == "max" else -1
        rated = [(sign * m.metric, order_of(n), n) for n, m in good.items() if m.metric is not None]
        kept.update(name for _, _, name in sorted(rated)[-1:])
    oldest = min(order_of(name) for name in kept)
    delete = [name for name in ordered if name not in kept]
    return delete + [name for name in bad if name.startswith(TEMPORARY) or order_of(name) < oldest]
