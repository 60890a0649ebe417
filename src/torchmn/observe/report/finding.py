"""One finding of a report, and the texts that describe phases."""

from dataclasses import dataclass
from typing import Literal

from torchmn.record.records import Phase

Kind = Literal[
    "late rank",
    "late host",
    "changing late ranks",
    "exchange",
    "slow link",
    "input",
    "slow steps",
    "slowing down",
    "phase",
]

MAX_FINDINGS = 5
MIN_SHARE = 0.02  # of a step: what costs less is left out

PHASE_TEXT: dict[Phase, str] = {
    "data": "waits for data",
    "copy": "copies data to the device",
    "forward": "computes in forward",
    "backward": "computes in backward",
    "exchange": "waits for the exchange",
    "encode": "encodes gradients",
    "decode": "decodes gradients",
    "optimizer": "updates parameters in the optimizer",
    "evaluation": "evaluates",
    "checkpoint": "writes checkpoints",
    "other": "runs code of the script that is not training",
}

CURES: dict[Phase, str] = {
    "data": "Load with more workers (num_workers, persistent_workers, prefetch_factor), decode "
    "less per sample, or keep the data on a local disk or in memory.",
    "copy": "Use pinned memory and non_blocking copies, and send samples in their smallest type.",
    "encode": "Use a cheaper codec, or none: this link may not need one (torchmn plan compares).",
    "decode": "Use a cheaper codec, or none: this link may not need one (torchmn plan compares).",
    "optimizer": "Use a fused or foreach optimizer.",
    "evaluation": "Evaluate less often, or on fewer samples.",
    "checkpoint": "Write checkpoints less often, or asynchronously to a local disk.",
    "other": "See it with torchmn run --profile: logging, metrics and .item() are common causes.",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause that limits a run, with its evidence and cure."""

    kind: Kind
    share: float  # of the mean step, that would be saved
    what: str
    evidence: str
    cure: str
    # Whether something is wrong with a rank, host or link, and not the training just so.
    is_fault: bool
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    phase: Phase | None = None


def plural(words: str) -> str:
    """Turn the text of a phase, as in "computes", into the plural."""
    verb, space, rest = words.partition(" ")
    return ("do" if verb == "does" else verb.removesuffix("s")) + space + rest
