"""Staging: CUDA tensors through pinned host memory, for libraries that cannot read GPU memory.

Large messages are sent in chunks: while one is on its way, the GPU copies later ones down and
earlier ones up. So both sides of a message must stage it: all ranks of a job have GPUs, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchmn.base.errors import TimeLimitError
from torchmn.cluster.units import MiB
from torchmn.comm.streams import Event, Streams, streams_of
from torchmn.comm.transports.base import Message, Scratch, TimeLimit, poll_until

_POLLS_BEFORE_YIELD = 200
_NUM_CHUNKS = 8  # of a message; each costs the latency of the link once
_CHUNK_BYTES = MiB

ExchangeOnHost = Callable[[Sequence[Message], Sequence[Message]], None]


class Staging:
    """A pinned buffer through which the messages of one exchange at a time are copied. Local.

    Args:
        chunk_bytes: the least size of a chunk, the same on all ranks.
        find_streams: returns the streams of a device.
    """

    def __init__(
        self,
        *,
        chunk_bytes: int = _CHUNK_BYTES,
        find_streams: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        self._pinned = Scratch(pin_memory=torch.cuda.is_available())
        self._chunk_bytes, self._find_streams = chunk_bytes, find_streams

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        limit: TimeLimit,
        on_host: ExchangeOnHost,
    ) -> None:
        """Copy outgoing tensors to the host, call ``on_host`` with the copies, copy results back.

        ``on_host`` is called several times, each time with at most one chunk to and one from each
        peer, in the order of their messages. Tensors are on one GPU or on the CPU. Raises
        TimeLimitError if this rank's GPU does not complete its work in time, and the errors of
        ``on_host``.
        """
        tensors = [tensor for _, tensor in (*sends, *recvs)]
        device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
        streams = self._find_streams(device)
        sizes = [tensor.nbytes for tensor in tensors]
        host = self._pinned.take(sum(sizes), torch.uint8, torch.device("cpu"))
        pieces = list(host.split(sizes))
        outgoing = self._rounds(sends, pieces[: len(sends)])
        incoming = self._rounds(recvs, pieces[len(sends) :])
        are_there: list[Event | None] = []
        for chunks in outgoing:
            for _, tensor, piece in chunks:
                piece.copy_(tensor, non_blocking=True)
            # An event for each round: its chunks are sent as soon as they are on the host, while
            # those of later rounds are being copied.
            are_there.append(streams.record())
        for number in range(max(len(outgoing), len(incoming))):
            out, into = outgoing[number : number + 1], incoming[number : number + 1]
            if out:  # the library reads host memory now, outside any stream
                _await(are_there[number], device, limit)
            on_host(
                [(peer, piece) for chunks in out for peer, _, piece in chunks],
                [(peer, piece) for chunks in into for peer, _, piece in chunks],
            )
            for chunks in into:
                for _, tensor, piece in chunks:
                    tensor.copy_(piece, non_blocking=True)
        _await(streams.record(), device, limit)  # the next exchange overwrites the pinned buffer

    def _rounds(
        self, messages: Sequence[Message], pieces: Sequence[Tensor]
    ) -> list[list[tuple[int, Tensor, Tensor]]]:
        """(peer, chunk of a tensor, its host memory): lists with at most one for each peer."""
        by_peer: defaultdict[int, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        for (peer, tensor), piece in zip(messages, pieces, strict=True):
            nbytes = max(self._chunk_bytes, -(-len(piece) // _NUM_CHUNKS))
            parts = zip(tensor.view(torch.uint8).split(nbytes), piece.split(nbytes), strict=True)
            by_peer[peer] += [(peer, part, there) for part, there in parts if len(there)]
        longest = max(map(len, by_peer.values()), default=0)
        return [[c[n] for c in by_peer.values() if n < len(c)] for n in range(longest)]


def await_stream(device: torch.device, limit: TimeLimit) -> None:
    """Block until a GPU has completed the work of the current stream. Local. No-op on the CPU.

    `torch.cuda.Stream.synchronize` has no time limit: a kernel that never ends would block this
    rank forever, without an error. Raises TimeLimitError.
    """
    if device.type != "cuda":
        return
    passed = torch.cuda.Event()
    passed.record(torch.cuda.current_stream(device))
    _await(passed, device, limit)


def _await(passed: Event | None, device: torch.device, limit: TimeLimit) -> None:
    if passed is not None and not poll_until(passed.query, limit, _POLLS_BEFORE_YIELD):
        raise TimeLimitError(
            f"{device} of this rank did not finish its own work within {limit.seconds:g} s: a "
            "kernel runs for long or never ends. Look for what this rank launched last, or raise "
            "timeout_s=."
        )
