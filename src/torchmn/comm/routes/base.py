"""The base class of routes, which sum a buffer over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchmn.base import events
from torchmn.cluster import Topology
from torchmn.cluster.units import KiB, MiB
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

_MIN_STRIPE_BYTES = 128 * KiB  # 1 ms at 1 Gb/s, while one sum more costs 0.3 ms of a processor


class Route:
    """Base class of routes: sums buffers over the ranks of one communicator.

    A subclass defines `_sum_`.

    Args:
        groups: the groups of the communicator.
        topology: the hosts of all ranks.
        device: the GPU of this rank, or the CPU.
        codec: the codec of sums that are not given an algorithm, or None.
    """

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "bucket"
    """The unit of a sum: each parameter, all of them, or a bucket while backward is running."""
    bucket_bytes: int = 4 * MiB
    """The least size of a bucket, except the first ones, see `first_bucket_bytes`."""
    shards_parameters: ClassVar[bool] = False
    """Whether messages between nodes may contain only a part of a parameter."""
    plain_sum: ClassVar[AllReduceAlgorithm] = NativeAllReduce()
    """The algorithm of sums without a codec."""

    def __init__(
        self, groups: Groups, topology: Topology, device: torch.device, codec: Codec | None
    ) -> None:
        self.groups, self.world = groups, groups.world
        self.rank, self.size = self.world.rank, self.world.size
        self.topology, self.device = topology, device
        self._engine, self._flight_recorder = self.world.engine, self.world.flight_recorder
        self.check_placement()
        self._connect()
        self._default_algorithm = self.allreduce_algorithm(codec)

    # ---- what a subclass defines ----

    def check_placement(self) -> None:
        """Raise UnsupportedError if the placement is not supported. Local, same on all ranks."""

    def _connect(self) -> None:
        """Create the groups that the route needs from ``self.groups``. *Collective.*"""

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Sum a block over all ranks, in place; bit-identical on all. Called in an engine job."""
        raise NotImplementedError

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        """Announce the first messages of `_sum_`, if they are known before it runs. Local."""

    def all_valid(self, is_valid: IsValid) -> IsValid:
        """Whether decoded values are valid on all ranks. Called in ``on_complete`` of a sum only.

        For a tensor on a GPU the result is a tensor on that GPU. By default it is ``is_valid``
        itself: all ranks have decoded the same bytes.
        """
        return is_valid

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients should be exchanged while backward is running."""
        return self.granularity == "bucket"

    @property
    def first_bucket_bytes(self) -> int:
        """The least size of the first bucket of a backward pass.

        Nothing is sent before it is full. It follows from what all ranks and all runs have in
        common, and from no measured rate, as the bits of sums depend on the buckets. On a GPU each
        sum costs the host some launches.
        """
        if not self.overlaps_backward or self.device.type != "cpu":
            return self.bucket_bytes
        return _MIN_STRIPE_BYTES * self.size

    @property
    def inter_node_group(self) -> Group | None:
        """The group whose sums use the slow links; None if this rank is in no such group."""
        return self.world

    @property
    def codec_scope(self) -> str:
        """The ranks or nodes between which a codec encodes messages, as text; empty if none."""
        return f"all {self.size} ranks" if self.size > 1 else ""

    # ---- sums ----

    def new_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed buffer (numel,) in the memory that this route sums fastest. *Collective.*

        On one node that is shared memory. All ranks must request the same sizes in the same order.
        """
        return self.groups.new_buffer(numel, dtype, device)

    def allreduce_algorithm(self, codec: Codec | None) -> AllReduceAlgorithm:
        """The algorithm of this route for a codec, or for None. Local, but for `PureNcclRoute`.

        Make it once and keep it: it may hold buffers for messages. Raises UsageError: the codec is
        neither a StripeCodec nor PowerSGD.
        """
        return self.plain_sum if codec is None else create_allreduce(codec)

    def sum_(
        self, block: ReduceBlock | Tensor, algorithm: AllReduceAlgorithm | None = None
    ) -> None:
        """Sum a buffer over all ranks, in place; bit-identical on all ranks. *Collective.*

        Raises UnsupportedError: the codec needs whole parameters and the route or the block has
        parts of parameters.
        """
        self._engine.call(self.sum_job(block, algorithm))

    def start_sum_(
        self, block: ReduceBlock | Tensor, algorithm: AllReduceAlgorithm | None = None
    ) -> Work[None]:
        """Start `sum_` and return at once. *Collective.*

        Do not use the buffer before `Work.wait` returns; that also raises the errors of `sum_`. All
        ranks must start their sums and collectives in the same order.
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
        """Make the job of a sum, to be passed to `Engine.call` or `Engine.submit` next.

        Args:
            block: a contiguous tensor (n,) of the same n and floating dtype on all ranks, which are
                not compared; or a `ReduceBlock`, whose layout codecs need.
            algorithm: from `allreduce_algorithm`; by default with the communicator's codec.
            bucket: the number of the bucket, for the flight recorder.
            step: the step of the optimizer, for the flight recorder.
            on_complete: called after the sum and before the next exchange of this rank, on the
                thread that runs the job. On a GPU the sum is then queued on the current stream, but
                not yet complete.
        """
        chosen = self._default_algorithm if algorithm is None else algorithm
        whole = block if isinstance(block, ReduceBlock) else ReduceBlock(block)
        # Here and not in the job: the messages can be sent while earlier sums are still running.
        self._prefetch_send(whole, chosen)
        for observer in events.observers:
            observer.exchange(self.groups, whole, bucket, "queued")

        def job() -> None:
            # The collectives of the route do not know the bucket: the recorder labels them until
            # the job ends. It runs alone, so no other collective gets the label.
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
        """Whether the job of a sum returns once it is queued on the device. Local.

        Such a job may run on the thread that submits it, see `Engine.submit`.
        """
        is_on_device = block.buffer.device.type == self._engine.device.type
        return is_on_device and algorithm.codec is None and self.groups.queue_sums_of(block.buffer)
