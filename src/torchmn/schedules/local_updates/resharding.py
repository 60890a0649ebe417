"""A block that was saved before it was full, on another number of workers.

Old rank i has parameters w_i and n_i samples of the block that began at anchor a; W' new ranks:

    n = sum_i n_i                               samples of the block so far
    w = sum_i n_i w_i / n                       where every new rank continues
    n / W'                                      the samples counted by each of them

The end of a block moves along d = sum_j n'_j (a - w'_j) / sum_j n'_j: at this point d and n would
be those of the old ranks. So what each of them has learned counts as before, with its weight, and
the block is as full. As all new ranks start from the same point, nothing is left out of the mean.

With a pending exchange: w_i(t), from which each rank continues, is averaged with the same weights
n_i, those of the samples since t, so that the mean of w_i - w_i(t) is kept. The mean
pseudo-gradient is the same on all ranks, as are anchors, the outer state, and the total count.

Residuals of codecs are distributed by `compression.reshard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmn.communicators import Communicator
from torchmn.errors import UsageError
from torchmn.resharding import mean_tensor, reshard_codec

State = dict[str, Any]


def reshard_blocks(states: Sequence[State], comm: Communicator, *, num_sharing: int) -> State:
    """The state of a `LocalUpdateSchedule` that this rank loads, from those of all old ranks.

    Local. ``num_sharing``: how many ranks train as one worker with this one, itself included.
    Raises UsageError: ranks were saved at different exchanges.
    """
    first = states[0]
    if not all("names" in state for state in states):
        return first
    _raise_if_apart(states, comm)
    # Ranks of a node that train as one worker have all counted the samples of all of them.
    counts = [
        [count / max(1, state["num_sharing"]) for count in state["block_samples"]]
        for state in states
    ]
    share = num_sharing / comm.size
    seen = sum(s["order"]["samples"] / max(1, s["num_sharing"]) for s in states)
    return {
        **first,
        "block_samples": [sum(per_rank) * share for per_rank in zip(*counts, strict=True)],
        "order": {**first["order"], "samples": seen * share},
        "num_sharing": num_sharing,
        "pending": _pending(states, counts),
        "codecs": [
            reshard_codec(codecs, comm)
            for codecs in zip(*(state["codecs"] for state in states), strict=True)
        ],
        "parameters": _parameters(states, counts),
    }


def _parameters(states: Sequence[State], counts: Sequence[Sequence[float]]) -> State:
    """The means of the ranks' parameters. A rank that does not list one has it at its anchor."""
    fragment_of = {n: i for i, names in enumerate(states[0]["names"]) for n in names}
    changed = [name for name in fragment_of if any(name in s["parameters"] for s in states)]
    return {
        name: mean_tensor(
            [state["parameters"].get(name, state["anchors"][name]) for state in states],
            [per_fragment[fragment_of[name]] for per_fragment in counts],
        )
        for name in changed
    }


def _pending(states: Sequence[State], counts: Sequence[Sequence[float]]) -> State:
    pending: State = states[0]["pending"]
    if not pending or pending["starts"] is None:
        return pending
    weights = [per_fragment[pending["fragment"]] for per_fragment in counts]
    all_starts = [state["pending"]["starts"] for state in states]
    starts = [mean_tensor(starts, weights) for starts in zip(*all_starts, strict=True)]
    return {**pending, "starts": starts}


def _raise_if_apart(states: Sequence[State], comm: Communicator) -> None:
    positions = [(s["order"]["next"], s["pending"].get("fragment", "none")) for s in states]
    if len(set(positions)) > 1:
        described = ", ".join(
            f"rank {rank}: next {following}, pending {pending}"
            for rank, (following, pending) in enumerate(positions)
        )
        raise UsageError(
            f"{comm.rank_label}: the old ranks were saved at different exchanges of their blocks "
            f"(fragments {described}), and cannot be combined for another number of ranks. Save "
            "where all ranks have made the same number of steps, or after optimizer.flush()."
        )
