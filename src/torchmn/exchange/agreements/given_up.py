"""A backward pass that raised: its exchange is ended without means."""

from __future__ import annotations

from torchmn.exchange.agreements.together import Together


class GivenUp(Together):
    """Whether a rank gave up the backward pass of this exchange, which had raised."""

    voids_exchange = True
    what = (
        "raised an exception in its backward pass, so there are no means of this step. Handle the "
        "exception on all ranks, for instance by a collective that informs the others, and skip or "
        "repeat the step on all"
    )
