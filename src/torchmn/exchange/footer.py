"""The footer of an exchange: what ranks report beside their gradients, summed with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torchmn.comm import Communicator
from torchmn.errors import CommunicationError, RankMismatchError, UsageError
from torchmn.exchange.replica_divergence import UNKNOWN, Replica
from torchmn.exchange.sample_proportions import (
    NOT_COMPARED,
    NUM_TRIED,
    Shares,
    disproportion,
    miscount,
)
from torchmn.exchange.weights import PassContext

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
    NUM_STEPS,
    CHECKSUM,
    GIVEN,
    FITS,
) = range(21)
NUM_FOOTER = FITS + NUM_TRIED
"""The elements of a footer, the last ones those of `sample_proportions`. After them come presence
flags, one per parameter, if asked for.

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
_MAX_STEPS = 64
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
    row[GIVEN] = float(context.is_weight_given)
    row[LATE] = float(context.is_late and context.is_active)
    if context.is_active:
        steps, checksum = context.replica[:2] if context.replica is not None else (None, None)
        row[NUM_STEPS] = UNKNOWN if steps is None else float(min(steps, _MAX_STEPS))
        row[CHECKSUM] = UNKNOWN if checksum is None else 0.0  # its device writes it
        row[FITS:NUM_FOOTER] = NOT_COMPARED if context.shares is None else context.shares.fits
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
    CommunicationError: the ranks are at different exchanges. Warns if parameters differ.
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
    if context.is_active and context.replica is not None:
        _check_replicas(comm, row, context.replica, context.step)
    if context.shares is not None:
        _check_shares(comm, row, context.num_samples, context.shares)
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


def _check_replicas(comm: Communicator, row: Sequence[float], replica: Replica, step: int) -> None:
    """Raise RankMismatchError if steps differ; warn if parameters do."""
    num_active, steps = round(row[ACTIVE]), replica.num_steps
    if (
        steps is not None
        and row[NUM_STEPS] >= 0
        and row[NUM_STEPS] != min(steps, _MAX_STEPS) * num_active
    ):
        raise RankMismatchError(
            f"{comm.rank_label}: the ranks have made different numbers of optimizer steps since "
            f"the exchange of gradients before: {steps} here, {row[NUM_STEPS] / num_active:g} in "
            "the mean over ranks, so that their parameters differ. Leave a step out on all ranks "
            "or on none: decide by a value that all ranks share, such as "
            "comm.allreduce(loss.detach(), 'mean')."
        )
    if (
        replica.checksum is not None
        and row[CHECKSUM] >= 0
        and row[CHECKSUM] != int(replica.checksum) * num_active
    ):
        replica.watch.warn(comm, replica.part, step)


def _check_shares(
    comm: Communicator, row: Sequence[float], num_samples: float, shares: Shares
) -> None:
    """Raise UsageError in the first pass over a loader, later warn, of wrong weights."""
    compared_by = shares.compared_by
    if compared_by.is_proportional(row[FITS:NUM_FOOTER], row[SAMPLES], shares):
        return
    text = f"{comm.rank_label}: {disproportion(num_samples, row[SAMPLES], shares)}"
    if compared_by.is_in_first_pass:
        raise UsageError(text)
    if compared_by.first_warning():
        warnings.warn(text, stacklevel=2)
