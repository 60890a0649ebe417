"""CUDA tensors over libraries that cannot read the memory of a GPU: through pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchmn.base.errors import TimeLimitError
from torchmn.comm.transports.base import Message, Scratch, TimeLimit, poll_until

_POLLS_BEFORE_YIELD = 200

ExchangeOnHost = Callable[[Sequence[Message], Sequence[Message]], None]


class Staging:
    """One pinned buffer, through which the messages of one exchange at a time are copied. Local."""

    def __init__(self) -> None:
        self._pinned = Scratch(pin_memory=torch.cuda.is_available())

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        limit: TimeLimit,
        on_host: ExchangeOnHost,
    ) -> None:
        """Copy what is sent, call ``on_host`` with messages in host memory, copy what has arrived.

        Tensors are on one GPU or on the CPU. Raises TimeLimitError: this rank's GPU does not get
        here in time; and what ``on_host`` raises.
        """
        tensors = [tensor for _, tensor in (*sends, *recvs)]
        device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
        sizes = [tensor.nbytes for tensor in tensors]
        host = self._pinned.take(sum(sizes), torch.uint8, torch.device("cpu"))
        pieces = list(host.split(sizes))
        outgoing, incoming = pieces[: len(sends)], pieces[len(sends) :]
        for (_, tensor), piece in zip(sends, outgoing, strict=True):
            piece.copy_(tensor.view(torch.uint8), non_blocking=True)
        await_stream(device, limit)
        on_host(
            [(peer, piece) for (peer, _), piece in zip(sends, outgoing, strict=True)],
            [(peer, piece) for (peer, _), piece in zip(recvs, incoming, strict=True)],
        )
        for (_, tensor), piece in zip(recvs, incoming, strict=True):
            tensor.view(torch.uint8).copy_(piece, non_blocking=True)
        await_stream(device, limit)  # the pinned buffer is used again


def await_stream(device: torch.device, limit: TimeLimit) -> None:
    """Return when a GPU has done what is queued on the current stream. Local; nothing on the CPU.

    `torch.cuda.Stream.synchronize` has no time limit: a kernel that never ends would hold this rank
    for ever, without an error. Raises TimeLimitError.
    """
    if device.type != "cuda":
        return
    passed = torch.cuda.Event()
    passed.record(torch.cuda.current_stream(device))
    if not poll_until(passed.query, limit, _POLLS_BEFORE_YIELD):
        raise TimeLimitError(
            f"{device} of this rank did not finish its own work within {limit.seconds:g} s: a "
            "kernel runs for long or never ends. Look for what this rank launched last, or raise "
            "timeout_s=."
        )
