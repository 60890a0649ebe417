"""Staging: CUDA tensors through pinned host memory, for libraries that cannot read GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchmn.base.errors import TimeLimitError
from torchmn.comm.transports.base import Message, Scratch, TimeLimit, poll_until

_POLLS_BEFORE_YIELD = 200

ExchangeOnHost = Callable[[Sequence[Message], Sequence[Message]], None]


class Staging:
    """A pinned buffer through which the messages of one exchange at a time are copied. Local."""

    def __init__(self) -> None:
        self._pinned = Scratch(pin_memory=torch.cuda.is_available())

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        limit: TimeLimit,
        on_host: ExchangeOnHost,
    ) -> None:
        """Copy outgoing tensors to the host, call ``on_host`` with the copies, copy results back.

        Tensors are on one GPU or on the CPU. Raises TimeLimitError if this rank's GPU does not
        complete its work in time, and the errors of ``on_host``.
        """
        tensors = [tensor for _, tensor in (*sends, *recvs)]
        device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
        sizes = [tensor.nbytes for tensor in tensors]
        host = self._pinned.take(sum(sizes), torch.uint8, torch.device("cpu"))
        pieces = list(host.split(sizes))
        outgoing, incoming = pieces[: len(sends)], pieces[len(sends) :]
        for (_, tensor), piece in zip(sends, outgoing, strict=True):
            piece.copy_(tensor.view(torch.uint8), non_blocking=True)
        await_stream(device, limit)  # the library reads host memory now, outside any stream
        on_host(
            [(peer, piece) for (peer, _), piece in zip(sends, outgoing, strict=True)],
            [(peer, piece) for (peer, _), piece in zip(recvs, incoming, strict=True)],
        )
        for (_, tensor), piece in zip(recvs, incoming, strict=True):
            tensor.view(torch.uint8).copy_(piece, non_blocking=True)
        await_stream(device, limit)  # the next exchange overwrites the pinned buffer


def await_stream(device: torch.device, limit: TimeLimit) -> None:
    """Block until a GPU has completed the work of the current stream. Local. No-op on the CPU.

    `torch.cuda.Stream.synchronize` has no time limit: a kernel that never ends would block this
    rank forever, without an error. Raises TimeLimitError.
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
