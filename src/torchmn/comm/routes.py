"""Routes: the paths by which a sum travels over ranks and nodes, one class each."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from torchmn.cluster.units import MiB
from torchmn.comm.allreduce import AllReduceAlgorithm, ReduceBlock, ReduceScatterAllGather
from torchmn.comm.base import Communicator, Granularity
from torchmn.comm.group import Group
from torchmn.comm.transports.gloo_nccl import TorchDistributedTransport
from torchmn.errors import UnsupportedError

_UNHIDDEN_BUCKET_BYTES = 64 * MiB  # nothing waits for a bucket: few of them need few waits


class FlatCommunicator(Communicator):
    """Blocking, one collective for everything, after backward (ChainerMN's `flat`)."""

    name = "flat"
    granularity: ClassVar[Granularity] = "everything"

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)


class NaiveCommunicator(FlatCommunicator):
    """Blocking, one collective per parameter, after backward (ChainerMN's `naive`)."""

    name = "naive"
    granularity = "parameter"


class PureNcclCommunicator(Communicator):
    """One NCCL all-reduce per bucket over all GPUs (ChainerMN's `pure_nccl`)."""

    name = "pure_nccl"

    def check_placement(self) -> None:
        if self.device.type != "cuda":
            raise UnsupportedError(
                "pure_nccl needs a CUDA device on every rank, and this rank found none. "
                "Use 'auto', 'single_node' or 'hierarchical' on CPUs."
            )
        transport = self.world.transport
        if transport.name != TorchDistributedTransport.name:
            raise UnsupportedError(
                f"pure_nccl needs transport='torch', not {transport.name!r}: NCCL is reached "
                "through torch.distributed."
            )
        if not transport.supports_nccl:
            raise UnsupportedError(
                f"pure_nccl needs a GPU for each of the {self.size} ranks, and some share one, "
                "which NCCL refuses, or this build of torch has no NCCL. Use 'auto', "
                "'single_node' or 'hierarchical', which then send through host memory."
            )

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        algorithm.sum_(self.world, block)


class SingleNodeCommunicator(Communicator):
    """For ranks that share a node (ChainerMN's `single_node`).

    Through shared memory sums stay in full precision whatever the codec: nothing crosses between
    nodes, and narrowing is work for the cores that train (VGG with float16 had 0.76 to 1.03 x the
    throughput of DistributedDataParallel in five runs on a machine shared with others).
    """

    name = "single_node"
    _node: Group

    def check_placement(self) -> None:
        if self.inter_size != 1:
            raise UnsupportedError(
                f"single_node supports one node only, but there are {self.topology}. "
                "Use 'hierarchical', 'two_dimensional' or 'auto'."
            )

    def _connect(self) -> None:
        self._node = self._groups.with_shared_memory(self.world)
        if not self.overlaps_backward:
            self.bucket_bytes = _UNHIDDEN_BUCKET_BYTES

    @property
    def overlaps_backward(self) -> bool:
        """Only on GPUs. Through shared memory the sum is work for the core that backward needs.

        VGG, 2 ranks on 2 cores: 1.00 x DistributedDataParallel on gloo if overlapped with backward,
        1.01 to 1.04 x after it.
        """
        return self.device.type == "cuda"

    @property
    def inter_node_group(self) -> Group | None:
        """See `Communicator.inter_node_group`: through shared memory nothing is slow."""
        return None if self._node.transport.is_shared_memory else self._node

    @property
    def codec_scope(self) -> str:
        return "" if self.inter_node_group is None else super().codec_scope

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        is_shared = self._node.transport.is_shared_memory
        (self.plain_sum if is_shared else algorithm).sum_(self._node, block)


class _BetweenNodes(Communicator):
    """Sums inside of each node first: a codec encodes only what passes between nodes."""

    plain_sum = ReduceScatterAllGather()
    _node: Group

    def _connect(self) -> None:
        nodes = self.topology.nodes
        self._node = self._groups.with_shared_memory(self._groups.own_part("node", nodes))

    @property
    def codec_scope(self) -> str:
        num_nodes = len(self.topology.nodes)
        return f"the {num_nodes} nodes" if num_nodes > 1 else ""

    def all_valid(self, is_valid: bool) -> bool:
        """The other ranks of the node have decoded other bytes, or none; elsewhere the same."""
        return self._node.all_true(is_valid)


class HierarchicalCommunicator(_BetweenNodes):
    """For nodes with one network adapter each (ChainerMN's `hierarchical`).

    Reduce to intra_rank 0 of each node, all-reduce between these leaders in stripes (all-to-all,
    sum at the owner, all-gather), broadcast in the node. Nodes may have different numbers of ranks.
    A codec encodes only what passes between leaders.
    """

    name = "hierarchical"
    _leaders: Group | None

    def _connect(self) -> None:
        super()._connect()
        leaders = [ranks[0] for ranks in self.topology.nodes]
        self._leaders = self._groups.part("leaders", leaders)

    @property
    def inter_node_group(self) -> Group | None:
        return self._leaders

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        if self._node.size > 1:
            self._node.reduce_(block.buffer, 0)
        if self._leaders is not None:
            self._sum_over_leaders_(self._leaders, block, algorithm)
        if self._node.size > 1:
            self._node.broadcast_(block.buffer, 0)

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        # On all leaders or on none: announced messages use a connection of their own.
        if self._leaders is not None and self._leaders.size == self.size:
            algorithm.prefetch_send(self._leaders, block)

    def _sum_over_leaders_(
        self, leaders: Group, block: ReduceBlock, algorithm: AllReduceAlgorithm
    ) -> None:
        algorithm.sum_(leaders, block)


class NonCudaAwareCommunicator(HierarchicalCommunicator):
    """For GPUs whose network library cannot read GPU memory (ChainerMN's `non_cuda_aware`).

    Reduce to intra_rank 0 on the GPUs, copy to pinned host memory, all-reduce between leaders on
    the host, copy back, broadcast on the GPUs. CPU tensors are not copied.
    """

    name = "non_cuda_aware"
    _host: Tensor | None = None

    def _sum_over_leaders_(
        self, leaders: Group, block: ReduceBlock, algorithm: AllReduceAlgorithm
    ) -> None:
        buffer = block.buffer
        if not buffer.is_cuda:
            super()._sum_over_leaders_(leaders, block, algorithm)
            return
        if self._host is None or self._host.numel() < buffer.nbytes:
            self._host = torch.empty(
                buffer.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu"
            )
        host = self._host[: buffer.nbytes].view(buffer.dtype)
        host.copy_(buffer, non_blocking=True)
        leaders.await_stream(buffer.device)
        super()._sum_over_leaders_(leaders, block.with_buffer(host), algorithm)
        buffer.copy_(host, non_blocking=True)
        leaders.await_stream(buffer.device)  # the pinned buffer is used again


class TwoDimensionalCommunicator(_BetweenNodes):
    """For nodes with several network adapters (ChainerMN's `two_dimensional`).

    Reduce-scatter in the node, all-reduce of each stripe with the ranks of the same intra_rank on
    the other nodes, all-gather in the node. All nodes need the same number of ranks, which
    ChainerMN did not check. A codec encodes only what passes between nodes.
    """

    name = "two_dimensional"
    shards_parameters = True
    _column: Group

    def check_placement(self) -> None:
        if not self.topology.is_balanced:
            raise UnsupportedError(
                f"two_dimensional needs the same number of ranks on every node, but there are "
                f"{self.topology}. Use 'hierarchical', or start the same number "
                "of ranks on every node."
            )

    def _connect(self) -> None:
        super()._connect()
        columns = list(zip(*self.topology.nodes, strict=True))
        self._column = self._groups.own_part("column", columns)

    @property
    def inter_node_group(self) -> Group | None:
        return self._column

    def _sum_(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        mine = block
        if self._node.size > 1:
            part = self._node.reduce_scatter_stripes_(block.buffer)
            start = int(part.storage_offset()) - int(block.buffer.storage_offset())
            mine = block.between(start, start + part.numel())
        algorithm.sum_(self._column, mine)
        if self._node.size > 1:
            self._node.all_gather_stripes_(block.buffer)

    def _prefetch_send(self, block: ReduceBlock, algorithm: AllReduceAlgorithm) -> None:
        if self._node.size == 1:
            algorithm.prefetch_send(self._column, block)
