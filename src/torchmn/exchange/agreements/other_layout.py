"""Parameters that were changed, so that the buckets must be laid out again."""

from __future__ import annotations

from torchmn.exchange.agreements.together import Together


class OtherLayout(Together):
    """Whether a rank has other parameters than its buckets are for."""

    voids_exchange = True
    what = (
        "changed the dtype, device, shape or requires_grad of its parameters since the last "
        "exchange. Do the same on all ranks, between the same steps"
    )
