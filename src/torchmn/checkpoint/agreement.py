"""Rounds in which ranks tell each other how far they are, beside the exchange of gradients.

They may come at very different times, for disks differ, so a round waits longer than a collective.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.transports.base import Patience, Transport, break_off
from torchmn.errors import PeerLostError, TimeLimitError

_LONGEST_WAIT_S = 3600.0
_LONGEST_PAUSE_S = 0.01


class Agreement:
    """Values of all ranks for all, over a transport of its own. One thread of a rank at a time."""

    def __init__(self, transport: Transport | None, speaker: str) -> None:
        self._transport = transport
        self._speaker = speaker
        self._patience: Patience | None = None
        self._waiting_since_s: float | None = None

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, plain JSON, in rank order. *Collective.*

        Raises PeerLostError, TimeLimitError: a rank is gone, or silent for an hour.
        """
        transport = self._transport
        if transport is None:
            return [value]
        raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
        mine = torch.frombuffer(raw, dtype=torch.uint8)
        others = [peer for peer in range(transport.size) if peer != transport.rank]
        sizes = {peer: torch.zeros(1, dtype=torch.int64) for peer in others}
        size = torch.tensor([mine.numel()])
        self._waiting_since_s = time.monotonic()
        try:
            self._exchange(dict.fromkeys(others, size), sizes)
            received = {
                peer: torch.empty(int(size), dtype=torch.uint8) for peer, size in sizes.items()
            }
            self._exchange(dict.fromkeys(others, mine), received)
        except (PeerLostError, TimeLimitError) as error:
            raise type(error)(
                f"{self._speaker}: another rank was lost while {what}: {error}"
            ) from error
        finally:
            self._waiting_since_s = None
        received[transport.rank] = mine
        return [json.loads(received[rank].numpy().tobytes()) for rank in range(transport.size)]

    def waited_s(self) -> float:
        """For how long this rank has been waiting for others in a round; 0 when in none."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def give_up(self) -> None:
        """Let a round that waits end with an error. From another thread; nothing comes after."""
        if self._patience is not None:
            self._patience.end()
        if self._transport is not None:
            break_off(self._transport)

    def _exchange(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
        if self._transport is not None:
            self._patience = Patience(_LONGEST_WAIT_S, _LONGEST_PAUSE_S)
            self._transport.exchange(list(sends.items()), list(recvs.items()), self._patience)
