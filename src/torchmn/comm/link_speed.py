"""Measured latency and bandwidth of a group's links.

All ranks send to the next rank and receive from the previous one at the same time, as an exchange
of gradients does, with enough bytes to take much longer than the latency. Times are those of the
slowest rank, so all ranks get the same numbers. Short messages to all other ranks at once give the
cost of each additional message.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchmn.cluster.units import KiB, MiB
from torchmn.comm.group import Group

_CPU = torch.device("cpu")
_NUM_LATENCY_ROUNDS = 9
_NUM_BANDWIDTH_ROUNDS = 3
_LONG_S = 0.03
_FIRST_BYTES = 256 * KiB
_LAST_BYTES = 32 * MiB


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Latency and bandwidth per direction of one rank's link while all ranks use theirs.

    ``message_s`` is the time that each additional message takes that is sent at the same time.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    message_s: float = 0.0

    def seconds(self, nbytes: float, num_messages: int = 1) -> float:
        """Seconds to send ``nbytes`` in ``num_messages`` messages, one after the other."""
        return num_messages * self.latency_s + nbytes / self.bandwidth_bytes_per_s

    def __str__(self) -> str:
        return f"{self.bandwidth_bytes_per_s * 8e-9:.2g} Gb/s, {self.latency_s * 1e6:.0f} us"


def measure_links(group: Group, device: torch.device = _CPU) -> LinkSpeed | None:
    """Measure the links of a group; None for a single rank. *Collective.* Inside an engine job.

    ``device`` is the device of the gradients: CPU and CUDA tensors may use different libraries.
    Takes about 0.1 seconds, or longer if sending 256 KiB takes longer.
    """
    if group.size == 1:
        return None
    latency_s = min(_exchange_s(group, 8, device) for _ in range(_NUM_LATENCY_ROUNDS))
    nbytes = _FIRST_BYTES
    while (took_s := _exchange_s(group, nbytes, device)) < _LONG_S and nbytes < _LAST_BYTES:
        nbytes *= 4
    if took_s < 10 * _LONG_S:
        more = [_exchange_s(group, nbytes, device) for _ in range(_NUM_BANDWIDTH_ROUNDS - 1)]
        took_s = statistics.median([took_s, *more])
    message_s = 0.0
    if group.size > 2:
        others = group.others
        all_s = min(_timed(group, 8, others, others, device) for _ in range(_NUM_LATENCY_ROUNDS))
        message_s = max(0.0, all_s - latency_s) / (group.size - 2)
    return LinkSpeed(
        latency_s=latency_s,
        bandwidth_bytes_per_s=nbytes / max(took_s - latency_s, 1e-9),
        message_s=message_s,
    )


def _exchange_s(group: Group, nbytes: int, device: torch.device) -> float:
    """Seconds of one exchange with both neighbours, on the slowest rank."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return _timed(group, nbytes, [after], [before], device)


def _timed(
    group: Group,
    nbytes: int,
    targets: Sequence[int],
    sources: Sequence[int],
    device: torch.device,
) -> float:
    outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    incoming = [torch.empty_like(outgoing) for _ in sources]
    group.await_stream(device)  # on a GPU the zeros are only queued
    group.barrier()  # so that no rank's time includes the wait for a late one
    started = time.perf_counter()
    group.exchange(
        [(target, outgoing) for target in targets],
        list(zip(sources, incoming, strict=True)),
        name="measure_links",
    )
    group.await_stream(device)  # on a GPU the exchange is only queued when it returns
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device="cpu")
    group.all_reduce_(took, "max")
    return float(took)
