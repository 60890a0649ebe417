"""Resharding a block that was saved before it was full, for another number of workers.

Old rank i has parameters w_i and n_i samples of the block that began at anchor a; W' new ranks:

    n = sum_i n_i                               samples of the block so far
    w = sum_i n_i w_i / n                       where every new rank continues
    n / W'                                      the samples counted by each of them

The end of a block moves along d = sum_j n'_j (a - w'_j) / sum_j n'_j: at this point d and n are
those of the old ranks. So the changes made by each of them count as before, with its weight, and
the block is as full as it was. As all new ranks start from the same point, nothing is missing in
the mean.

With a pending exchange: w_i(t), from which each rank continues, is averaged with the same weights
n_i, those of the samples since t, so that the mean of w_i - w_i(t) is kept. The mean
pseudo-gradient is the same on all ranks, as are anchors, the outer state, and the total count.

Residuals of codecs are distributed by `torchmn.compression.reshard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.exchange.resharding import mean_tensor, reshard_codec

State = dict[str, Any]


def reshard_blocks(states: Sequence[State], comm: Communicator, *, num_sharing: int) -> State:
    """Return the `LocalUpdateSchedule` state that this rank loads, from those of all old ranks.

    Local. ``num_sharing``: the number of ranks that train as one worker together with this one,
    including it. Raises UsageError: the old ranks were saved at different exchanges.
    """
    first = states[0]
    if not all("fragments" in state for state in states):
        return first
    _raise_if_apart(states, comm)
    # Ranks of a node that train as one worker have all counted the samples of all of them.
    sharing = [max(1, state["num_sharing"]) for state in states]
    share = num_sharing / comm.size
    samples = [s["order"]["samples"] / n for s, n in zip(states, sharing, strict=True)]
    anchors = [state["anchors"] for state in states]
    return {
        **first,
        "order": {**first["order"], "samples": sum(samples) * share},
        "num_sharing": num_sharing,
        "fragments": [
            _reshard_fragment(parts, anchors, sharing, share, comm)
            for parts in zip(*(state["fragments"] for state in states), strict=True)
        ],
    }


def _reshard_fragment(
    parts: Sequence[State],
    anchors: Sequence[State],
    sharing: Sequence[int],
    share: float,
    comm: Communicator,
) -> State:
    """Reshard the states of one fragment.

    A rank whose state does not list a parameter has it at its anchor.
    """
    counts = [part["num_samples"] / n for part, n in zip(parts, sharing, strict=True)]
    exchange = parts[0]["exchange"]
    if exchange and exchange["starts"] is not None:
        all_starts = zip(*(part["exchange"]["starts"] for part in parts), strict=True)
        exchange = {**exchange, "starts": [mean_tensor(starts, counts) for starts in all_starts]}
    return {
        "names": parts[0]["names"],
        "num_samples": sum(counts) * share,
        "codec": reshard_codec([part["codec"] for part in parts], comm),
        "parameters": {
            name: mean_tensor(
                [p["parameters"].get(name, a[name]) for p, a in zip(parts, anchors, strict=True)],
                counts,
            )
            for name in parts[0]["names"]
            if any(name in part["parameters"] for part in parts)
        },
        "exchange": exchange,
    }


def _raise_if_apart(states: Sequence[State], comm: Communicator) -> None:
    positions = [(state["order"]["next"], _pending(state)) for state in states]
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


def _pending(state: State) -> int | str:
    """The index of the fragment whose exchange is pending, or "none"."""
    pending = [i for i, fragment in enumerate(state["fragments"]) if fragment["exchange"]]
    return pending[0] if pending else "none"
