"""Messages between ranks about checkpoints, independent of the exchange of gradients.

Ranks finish their file operations at different times, so a round may wait longer than a collective:
for the communicator's time limit, plus one second for every 10 MB written or read before the round.
"""

import json
import time
from typing import Any

import torch
from torch import Tensor

from torchmn.base.errors import PeerLostError, TimeLimitError
from torchmn.comm.base import Communicator
from torchmn.comm.flight_recorder import FlightRecorder, State
from torchmn.comm.transports.base import BackoffTimeLimit, Transport, abort_pending_receives

_SLOWEST_BYTES_PER_S = 10e6
_LONGEST_PAUSE_S = 0.01


class ControlChannel:
    """All-gather of small values over a transport of its own, by one thread of a rank at a time."""

    def __init__(
        self,
        transport: Transport | None,
        rank_label: str,
        timeout_s: float,
        *,
        recorder: FlightRecorder,
    ) -> None:
        self._recorder = recorder
        self._transport = transport
        self._timeout_s = timeout_s
        self._rank_label = rank_label
        self._time_limit: BackoffTimeLimit | None = None
        self._waiting_since_s: float | None = None

    def all_gather(self, value: Any, what: str, *, nbytes: int = 0) -> list[Any]:
        """Gather a JSON value from every rank, in rank order. *Collective.*

        ``nbytes`` is what a rank may have read or written since the last round. Raises
        PeerLostError, TimeLimitError: a rank was lost, or is late.
        """
        transport = self._transport
        if transport is None:
            return [value]
        raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
        limit_s = self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        self._waiting_since_s = time.monotonic()
        entry = self._recorder.begin("checkpoint", f"the round in which {what}", (), "-", limit_s)
        state: State = "failed"
        try:
            # Rows must have equal lengths, hence the sizes first. That round also waits for the
            # slowest disk; the second one meets ranks that have all arrived.
            sizes = self._gather(transport, torch.tensor([len(raw)], device="cpu"), limit_s)
            blanks = int(sizes.max()) - len(raw)  # which JSON ignores
            row = torch.frombuffer(raw + b" " * blanks, dtype=torch.uint8)
            rows = self._gather(transport, row, self._timeout_s)
            state = "done"
        except (PeerLostError, TimeLimitError) as error:
            state = "late" if isinstance(error, TimeLimitError) else "failed"
            raise type(error)(
                f"{self._rank_label}: another rank was lost while {what}: {error}"
            ) from error
        finally:
            self._recorder.end(entry, state)
            self._waiting_since_s = None
        return [json.loads(row.tobytes()) for row in rows.numpy()]

    def waited_s(self) -> float:
        """Seconds that this rank has been waiting in a round; 0 outside of one. On any thread."""
        since_s = self._waiting_since_s  # once: the thread in the round may reset it
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self, comm: Communicator) -> None:
        """Close the connections that ``comm`` made for it; no round may be in progress. Local."""
        transport, self._transport = self._transport, None
        if transport is not None:
            comm.groups.close_transport(transport)

    def abort(self) -> None:
        """Make the round in progress raise. For other threads; the channel is unusable after it."""
        if self._time_limit is not None:
            self._time_limit.end()
        if self._transport is not None:
            abort_pending_receives(self._transport)

    def _gather(self, transport: Transport, own: Tensor, limit_s: float) -> Tensor:
        """Gather tensors of shape (n,) from all W ranks as rows of (W, n). *Collective.*"""
        self._time_limit = BackoffTimeLimit(limit_s, _LONGEST_PAUSE_S)
        rows = own.new_empty(transport.size, own.numel())
        rows[transport.rank] = own
        transport.all_gather_stripes_(rows.view(-1), self._time_limit)
        return rows
