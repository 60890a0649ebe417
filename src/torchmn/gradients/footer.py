"""The footer of an exchange: what ranks report beside their gradients, summed with them."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.communicators import Communicator
from torchmn.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.gradients.weights import PassContext, miscount

(
    WEIGHT,
    ACTIVE,
    NONFINITE,
    SAMPLES,
    NUM_EXCHANGES,
    GIVEN_UP,
    OTHER_LAYOUT,
    LOADED,
    FLAGGED_RANKS,
    OWN_SQUARE,
    OWN_NOISE,
    MEAN_NOISE,
    MISCOUNTED,
    RATE,
    RATE_SQUARE,
    LATE,
    JOINT,
    NUM_FOOTER,
) = range(18)
"""The elements of a footer. After them come presence flags, one per parameter, if asked for.

`OWN_SQUARE` and the two after it are 0 unless norms are measured (`gradient_norms`).
"""

_FLAGS = {
    GIVEN_UP: (
        "raised an exception in its backward pass, so there are no means of this step. Handle the "
        "exception on all ranks, for instance by a collective that informs the others, and skip or "
        "repeat the step on all"
    ),
    OTHER_LAYOUT: (
        "changed the dtype, device, shape or requires_grad of its parameters since the last "
        "exchange. Do the same on all ranks, between the same steps"
    ),
    LOADED: (
        "loaded an optimizer state since the last exchange. Call load_state_dict() on all ranks, "
        "between the same steps, or only before create_multi_node_optimizer, which gives all ranks "
        "the state of rank 0"
    ),
}
"""What all ranks must do together, and what it means if only some did."""
_RATE_TOLERANCE = 1e-6
"""For each rank, of the square of the sum of rates: float32 rounds sums of n to 1e-7 n."""
_COUNT_MODULUS = 4096  # so that float32 can hold the sum of the counts of many ranks


def footer_row(
    context: PassContext, rank: int, presence: Sequence[bool], flag: int | None
) -> list[float]:
    """What one rank reports. ``flag``: `GIVEN_UP` or `OTHER_LAYOUT`, or None."""
    row = [0.0] * NUM_FOOTER + [float(is_present) for is_present in presence]
    row[WEIGHT], row[ACTIVE], row[SAMPLES] = context.weight, context.is_active, context.num_samples
    row[NUM_EXCHANGES] = float(context.index % _COUNT_MODULUS)
    row[RATE] = context.rate
    row[RATE_SQUARE] = 0.0 if context.may_rate_differ else context.rate**2
    row[JOINT] = float(context.is_joint)
    row[LATE] = float(context.is_late and context.is_active)
    if flag is None and context.has_loaded and context.is_active:
        flag = LOADED
    if flag is None and context.is_miscounted:
        flag = MISCOUNTED
    if flag is not None:
        row[flag], row[FLAGGED_RANKS] = 1.0, float(rank + 1)
    return row


def raise_if_flags_differ(comm: Communicator, row: Sequence[float], context: PassContext) -> None:
    """Raise RankMismatchError if only some ranks did what all must do. The same on all ranks.

    ``row`` is the sum over ranks. UsageError: a rank has counted something else than samples;
    CommunicationError: the ranks are at different exchanges.
    """
    for flag, what in _FLAGS.items():
        num_flagged = round(row[flag])
        if 0 < num_flagged < (round(row[ACTIVE]) if flag == LOADED else comm.size):
            ranks = f"{num_flagged} of {comm.size} ranks each"
            if num_flagged == 1:
                ranks = f"rank {round(row[FLAGGED_RANKS]) - 1}"
            raise RankMismatchError(f"{comm.rank_label}: {ranks} {what}.")
    if num_flagged := round(row[MISCOUNTED]):
        raise UsageError(
            f"{comm.rank_label}: on {num_flagged} of {comm.size} ranks "
            f"{miscount(context.num_samples)}"
        )
    # By Cauchy and Schwarz this is 0 only where all are equal, and the same on all ranks. It is
    # negative where they may differ.
    spread = round(row[ACTIVE]) * row[RATE_SQUARE] - row[RATE] ** 2
    if spread > comm.size * _RATE_TOLERANCE * row[RATE] ** 2:
        raise RankMismatchError(
            f"{comm.rank_label}: the learning rates of the ranks differ: {context.rate:g} here, "
            f"{row[RATE] / max(1, round(row[ACTIVE])):g} in the mean over ranks (sums of the "
            "groups). The parameters would become others on each rank. Step schedulers on all "
            "ranks in the same way, and ReduceLROnPlateau by a value that all ranks share, such as "
            "comm.sum_over_ranks(loss_sum, n)."
        )
    count = context.index % _COUNT_MODULUS
    if row[NUM_EXCHANGES] != count * comm.size:
        raise CommunicationError(
            f"{comm.rank_label}: the ranks are at different exchanges of gradients: this one at "
            f"number {count}, the mean over ranks is {row[NUM_EXCHANGES] / comm.size:g}. All ranks "
            "must run the same number of backward() and step() calls, or end its loop inside "
            "optimizer.join()."
        )
