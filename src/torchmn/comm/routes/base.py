"""The base of routes: how a buffer is summed over all ranks, and which placements allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchmn.base import events
from torchmn.cluster import Topology
from torchmn.cluster.units import MiB
from torchmn.comm.allreduce import (
    AllReduceAlgorithm,
    NativeAllReduce,
    ReduceBlock,
    create_allreduce,
)
from torchmn.comm.codecs import Codec
from torchmn.comm.codecs.base import IsValid
from torchmn.comm.engine import Work
from torchmn.comm.group import Group, Groups

Granularity = Literal["parameter", "everything", "bucket"]


class Route:
    """The path of the sums of one communicator. A subclass defines `_sum_`.

    Args:
        groups: the world, and what is split from it.
        topology: the hosts of all ranks.
        device: the GPU of this rank, or the CPU.
        codec: the codec of sums without an algorithm of their own, or None.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "bucket"
    """What is summed at once: one parameter, all, or a bucket while backward runs."""
    bucket_bytes: int = 4 * MiB
    shards_parameters: ClassVar[bool] = False
    """Whether messages between nodes may hold a part of a parameter."""
    plain_sum: ClassVar[AllReduceAlgorithm] = NativeAllReduce()
    """How this route sums without a codec."""

    def __init__(
        self, groups: Groups, topology: Topology, device: torch.device, codec: Codec | None
    ) -> None:
        self.groups, self.world = groups, groups.world
        self.rank, self.size = self.world.rank, self.world.size
        self.topology, self.device = topology, device
        self._engine, self._flight_recorder = self.world.engine, self.world.flight_recorder
        self._default_algorithm = self.allreduce_algorithm(codec)
        self.check_placement()
        self._connect()

    # ---- what a subclass defines ----

    def check_placement(self) -> None:
        """Raise UnsupportedError if this route cannot serve this placement. Local, same on all."""

    def _connect(self) -> None:
        """Make the groups that the route needs, once, by methods of ``self.groups``."""

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Sum a block over all ranks, in place, with the same bits on all. In an engine job."""
        raise NotImplementedError

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Announce what `_sum_` will send first, if that is known before it runs. Local."""

    def all_valid(self, is_valid: IsValid) -> IsValid:
        """Whether what was decoded is valid on all ranks. Only in ``on_complete`` of a sum.

        A tensor of a GPU stays there, and so does the answer. By default all ranks have decoded the
        same bytes, so they agree.
        """
        return is_valid

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients should be exchanged while backward runs."""
        return self.granularity == "bucket"

    @property
    def inter_node_group(self) -> Group | None:
        """The group whose sums cross the slow links; None where there are none."""
        return self.world

    @property
    def codec_scope(self) -> str:
        """Between whom a codec encodes messages, as text for errors; empty if it encodes none."""
        return f"all {self.size} ranks" if self.size > 1 else ""

    # ---- sums ----

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros (numel,) where this route sums fastest: on one node in shared memory.

        *Collective*: all ranks request the same sizes in the same order.
        """
        return self.groups.new_buffer(numel, dtype, device)

    def allreduce_algorithm(self, codec: Codec | None) -> AllReduceAlgorithm:
        """How this route sums with a codec, or without one. Local. Make it once and keep it.

        Raises UsageError: the codec is neither a StripeCodec nor PowerSGD.
        """
        return self.plain_sum if codec is None else create_allreduce(codec)

    def sum_(
        self, block: ReduceBlock | Tensor, algorithm: AllReduceAlgorithm | None = None
    ) -> None:
        """Sum a buffer over all ranks, in place, with the same bits on all.

        Raises UnsupportedError: the codec needs whole parameters and the route or block has parts.
        """
        self._engine.call(self.sum_job(block, algorithm))

    def start_sum_(
        self, block: ReduceBlock | Tensor, algorithm: AllReduceAlgorithm | None = None
    ) -> Work[None]:
        """Start `sum_` and return at once; do not touch the buffer before `Work.wait` returns.

        All ranks start their sums and collectives in the same order. `Work.wait` raises what `sum_`
        would raise.
        """
        return self._engine.submit(self.sum_job(block, algorithm))

    def sum_job(
        self,
        block: ReduceBlock | Tensor,
        algorithm: AllReduceAlgorithm | None = None,
        *,
        bucket: int | None = None,
        step: int | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """A sum for the engine, which `Engine.call` or `Engine.submit` takes next.

        Args:
            block: a tensor (n,), contiguous, of the same n and floating dtype on all ranks, which
                is not compared; or a `ReduceBlock`, whose layout codecs need.
            algorithm: from `allreduce_algorithm`; by default with the communicator's own codec.
            bucket: a number for the flight recorder, with ``step``.
            step: the step of the optimizer, for the flight recorder.
            on_complete: called after the sum, before the next exchange of this rank begins, on the
                thread that makes it. On a GPU the sum is queued then, on the current stream, and
                not done.
        """
        chosen = self._default_algorithm if algorithm is None else algorithm
        whole = block if isinstance(block, ReduceBlock) else ReduceBlock(block)
        self._prefetch_send(whole, chosen)
        for observer in events.observers:
            observer.exchange(self.groups, whole, bucket, "queued")

        def job() -> None:
            self._flight_recorder.set_label(bucket, step)
            for observer in events.observers:
                observer.exchange(self.groups, whole, bucket, "started")
            try:
                self._sum_(whole, chosen)
            finally:
                self._flight_recorder.set_label(None, None)
                for observer in events.observers:
                    observer.exchange(self.groups, whole, bucket, "ended")
            if on_complete is not None:
                on_complete()

        return job

    def only_queues(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> bool:
        """Whether the job of a sum returns when it is queued on a device: no other thread has to
        run it, see `Engine.submit`. Local."""
        is_on_device = block.buffer.device.type == self._engine.device.type
        return is_on_device and algorithm.codec is None and self.groups.queue_sums_of(block.buffer)
