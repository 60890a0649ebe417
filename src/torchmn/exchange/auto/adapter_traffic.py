"""What crosses a host's network adapter when a buffer is summed, by route.

    N bytes, H hosts with k ranks each, W = H k ranks           bytes per adapter and direction
    hierarchical, two_dimensional                               2 (H - 1) / H  N
    flat, naive, non_cuda_aware: stripes at their owners        2 k (W - k) / W  N
    pure_nccl: a ring over all ranks                            2 (W - 1) / W  N
    single_node                                                 0

Several ranks that send at once share the adapter: the sums above are of all of them. Sums at the
owners of stripes take two rounds in which a rank sends to all others; a ring takes 2 (W - 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmn.errors import UnknownNameError, UsageError

STRIPED = ("flat", "naive", "non_cuda_aware")
NODE_FIRST = ("hierarchical", "two_dimensional")
ROUTES = (*NODE_FIRST, *STRIPED, "pure_nccl", "single_node")


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Of one buffer. ``share`` times its bytes cross each adapter in each direction."""

    share: float
    num_rounds: int
    """Messages that wait for each other."""
    num_messages: int
    """Messages that a rank sends, those of one round to different ranks."""


def crossing(route: str, num_hosts: int, ranks_per_host: int, *, is_encoded: bool) -> Crossing:
    """See above. Raises UnknownNameError, UsageError: single_node with several hosts."""
    if route not in ROUTES:
        raise UnknownNameError("route", route, ROUTES)
    size = num_hosts * ranks_per_host
    if route == "single_node" and num_hosts > 1:
        raise UsageError(f"The route single_node is for one host, not {num_hosts}.")
    if num_hosts == 1:
        return Crossing(share=0.0, num_rounds=0, num_messages=0)
    if route == "pure_nccl":
        num_rounds = 2 * (size - 1)
        return Crossing(share=num_rounds / size, num_rounds=num_rounds, num_messages=num_rounds)
    num_parts = num_hosts if route in NODE_FIRST else size
    swaps = num_parts == 2 and not is_encoded  # both send all they have, see `TcpTransport`
    if route in NODE_FIRST:
        share = 2 * (num_hosts - 1) / num_hosts
    else:
        share = 2 * ranks_per_host * (size - ranks_per_host) / size
    num_messages = 1 if swaps else 2 * (num_parts - 1)
    return Crossing(share=share, num_rounds=1 if swaps else 2, num_messages=num_messages)
