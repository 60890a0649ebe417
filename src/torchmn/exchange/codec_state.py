"""The codec of one reducer: how it is chosen, and its state on each rank."""

from __future__ import annotations

from typing import Any

from torchmn.base.errors import CheckpointWarning, PerformanceWarning, UnsupportedError
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec, create_codec


def own_codec(codec: str | Codec | None, comm: Communicator) -> Codec | None:
    """Return the codec of one reducer over ``comm``, a new instance with a state of its own. Local.

    ``codec`` None takes that of the communicator. Raises UnsupportedError: the communicator has a
    codec as well, or its route cannot carry this one.
    """
    if codec is None:
        chosen = comm.codec
    elif comm.codec is not None:
        raise UnsupportedError(
            f"The communicator was made with allreduce_grad_dtype={comm.codec.name!r}, and codec="
            f"{codec!r} was also requested. Give one of the two."
        )
    else:
        chosen = create_codec(codec)
    if chosen is None:
        return None
    if chosen.needs_whole_parameters and comm.route.shards_parameters:
        raise UnsupportedError(
            f"{chosen.name} needs whole parameters, and the route {comm.name!r} cuts them between "
            "the ranks of a node. Use 'hierarchical' or another codec."
        )
    # One object may be given to several optimizers, and residuals belong to one of them.
    return chosen.new_instance()


def warn_if_it_encodes_nothing(codec: Codec | None, comm: Communicator) -> None:
    """Warn on rank 0 if the route does not use the requested codec. Local."""
    if codec is None or comm.size == 1 or comm.rank != 0 or comm.route.codec_scope:
        return
    warn(
        f"{comm.rank_label}: the codec {codec.name} encodes nothing here: the route {comm.name!r} "
        f"encodes what crosses between nodes, and all {comm.size} ranks are on one, where sums are "
        "exact and faster without it. To encode between all ranks anyway, use "
        "torchmn.create_communicator('flat').",
        PerformanceWarning,
    )


def codec_state(codec: Codec | None, comm: Communicator) -> dict[str, Any]:
    """The codec's state on this rank, with the rank and the number of ranks. Local."""
    if codec is None:
        return {}
    return {"rank": comm.rank, "size": comm.size, "state": codec.state_dict()}


def load_codec_state(codec: Codec | None, comm: Communicator, state: dict[str, Any]) -> None:
    """Continue from a `codec_state`; warns of residuals that must be dropped. Local."""
    if codec is None:
        if state.get("state", {}).get("residuals"):
            warn(
                f"{comm.rank_label}: the saved state has residuals of a codec, which are dropped, "
                "because no codec is used here. Use the codec of the saved run.",
                CheckpointWarning,
            )
        return
    # What another rank has lost belongs to its own gradients: added here as well, it would count
    # twice, and what this rank has lost not at all.
    is_ours = (state.get("rank"), state.get("size")) == (comm.rank, comm.size)
    if state.get("state") and not is_ours:
        warn(
            f"{comm.rank_label}: the saved state of the codec {codec.name} is that of "
            f"rank {state['rank']} of {state['size']}, so this rank starts without residuals. "
            "Save and load optimizer.state_dict() on every rank; for another number of ranks "
            "load what optimizer.reshard_state_dict() makes of the states of all old ranks.",
            CheckpointWarning,
        )
    codec.load_state_dict(state["state"] if is_ours else {})
