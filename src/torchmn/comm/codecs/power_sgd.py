"""PowerSGD: gradients of matrices as products of two thin ones.

Each rank i holds its share M_i (n, m) of the mean M = sum_i M_i. One step of subspace iteration,
from Q (m, r) of the step before (T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical
Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019):

    V_i = M_i + R_i                     R_i: this rank's residual (error feedback)
    P   = orthogonalise(sum_i V_i Q)    (n, r)
    Q_i = V_i' P,   Q = sum_i Q_i       (m, r)
    M   becomes P Q',   R_i becomes V_i - P Q_i'

so that what is returned and the residuals of all ranks add up to the gradients. r (n + m) numbers
are sent instead of n m. Where the sum is not the mean but a multiple of it, R_i is converted as in
`error_feedback`; Q has no unit.

Differences from the paper and from PyTorch's hook: the residual is what this rank's own part has
lost, V_i - P Q_i', not V_i less the mean, which would keep the differences between ranks too. P is
summed and orthogonalised at one rank, and all use its bytes; P Q' is added up in one order without
fused operations: replicas stay bit-identical on different CPUs. A column of P that is negligible
after projection becomes zero instead of normalized rounding noise. A column of Q that has become
zero is initialized again, as is everything after a gradient of zeros. Residuals are stored by name.
Tensors that are not worth compressing (vectors, small matrices) are summed together with Q.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm.codecs.base import Codec, IsValid
from torchmn.comm.codecs.kernels import kernels_for
from torchmn.comm.codecs.layout import Layout, Segment, is_small
from torchmn.comm.codecs.residuals import Residuals

_NEGLIGIBLE = 1e-6  # length of a column after projection, relative to its length before


class Ranks(Protocol):
    """What PowerSGD needs of a communicator; every method is collective."""

    @property
    def rank(self) -> int:
        """The rank of the caller."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def reduce_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        """The sum over ranks of their ``xs[rank]``."""

    def allgather(self, x: Tensor) -> Sequence[Tensor]:
        """The ``x`` of all ranks, as returned by `reduce_scatter`, in rank order."""

    def allreduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on all."""


@dataclass
class _Matrix:
    """A gradient in an exchange: ``v`` (n, m) is M_i + R_i, then the new residual."""

    name: str
    target: Tensor
    v: Tensor
    q: Tensor
    p: Tensor


class PowerSGD(Codec):
    """A codec that reduces whole matrices, not stripes. One object belongs to one exchange.

    ``rank`` is r. Memory: 8 bytes an element, and Q. ``seed`` must be the same on all ranks.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> codec = PowerSGD(rank=2)
        >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model, codec=codec)
    """

    needs_whole_parameters = True
    keeps_residuals = True

    def __init__(self, rank: int = 4, *, seed: int = 0) -> None:
        if rank < 1:
            raise UsageError(f"rank={rank} must be at least 1.")
        super().__init__()
        self.rank = rank
        self.seed = seed
        self.name = f"power_sgd_{rank}"
        self._step = 0
        self._residuals = Residuals()
        self._q: dict[str, Tensor] = {}
        self._next_q: dict[str, Tensor] = {}
        """Q of the current exchange; valid when it ends."""
        self._starts: dict[str, Tensor] = {}
        """On GPUs: what replaces columns of Q that are zero."""

    def mean_(self, named_matrices: Iterable[tuple[str, Tensor]], comm: Ranks) -> None:
        """Make every tensor the mean over ranks of itself. *Collective.*

        Tensors of any shape, float32, float64 or 16 bits; one of two or more dims counts as the
        matrix (first dim, all others). All ranks give the same names and shapes in one order.
        """
        named = list(named_matrices)
        for _, tensor in named:
            tensor.div_(comm.size)
        self.sum_(named, comm)

    def sum_(self, named_matrices: Iterable[tuple[str, Tensor]], comm: Ranks) -> None:
        """Make every tensor the sum over ranks: of gradients that are shares of the mean.

        Precision is that of the tensors, inside `torch.autocast` as well.
        """
        named = list(named_matrices)
        kinds = {tensor.device.type for _, tensor in named}
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            self._sum_(named, comm)

    def _sum_(self, named_matrices: list[tuple[str, Tensor]], comm: Ranks) -> None:
        matrices: list[_Matrix] = []
        others: list[tuple[str, Tensor]] = []
        for name, tensor in named_matrices:
            if self._is_worth_compressing(tensor):
                matrices.append(self._begin(name, tensor))
            else:
                others.append((name, tensor))
        if comm.size == 1:
            self._flush_residuals(matrices)
            return
        for dtype in (torch.float32, torch.float64):
            own = [x for x in matrices if x.v.dtype == dtype]
            uncompressed = [(n, t) for n, t in others if _wide(t) == dtype and t.numel()]
            if own:
                self._reduce_p(own, comm)
            if own or uncompressed:
                self._reduce_q(own, uncompressed, comm, dtype)

    def finish(self, *, is_valid: IsValid) -> None:
        """End an exchange: make its residuals and Q valid, or discard them. See `Codec.finish`."""
        super().finish(is_valid=is_valid)
        self._residuals.finish(is_valid=is_valid)
        if isinstance(is_valid, Tensor):
            for name, q in self._next_q.items():
                self._q[name] = torch.where(is_valid, q, self._q[name])
        elif is_valid:
            self._q.update(self._next_q)
        self._next_q.clear()
        self._step += isinstance(is_valid, Tensor) or is_valid

    def new_instance(self) -> PowerSGD:
        return PowerSGD(self.rank, seed=self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Q and residuals by name, as copies; `residuals.reshard` serves these states as well."""
        residuals = self._residuals.state_dict()
        names = [entry["name"] for entry in residuals]
        return {
            "step": self._step,
            "q": {name: self._q[name].clone() for name in names if name in self._q},
            "residuals": residuals,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`; an empty dict resets."""
        self._step = int(state.get("step", 0))
        self._q = {name: q.clone() for name, q in state.get("q", {}).items()}
        self._next_q.clear()
        self._residuals.load_state_dict(state.get("residuals", []))

    # ---- one exchange ----

    def _is_worth_compressing(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or is_small(tensor.shape):
            return False
        n = tensor.shape[0]
        return 2 * self.rank * (n + tensor.numel() // n) <= tensor.numel()

    def _begin(self, name: str, tensor: Tensor) -> _Matrix:
        """Add the residual and multiply by Q."""
        wide = tensor.reshape(tensor.shape[0], -1).to(_wide(tensor))
        layout = Layout((Segment(name, 0, wide.numel()),), wide.dtype)
        self._residuals.scale = self.total_scale
        block = self._residuals.block("worker", layout, wide.device)
        v = torch.add(wide, block.current.view_as(wide), out=block.pending.view_as(wide))
        block.is_written = True
        q = self._q.get(name)
        if q is None or q.shape != (wide.shape[1], self.rank):  # none yet, or of another rank
            q = wide.new_zeros(wide.shape[1], self.rank)
        q = self._q[name] = q.to(wide)
        start = self._without_zero_columns(name, q).double()  # squares of 1e-25 vanish in 32 bits
        return _Matrix(name, tensor, v, q, v @ (start / start.norm(dim=0)).to(v))

    def _without_zero_columns(self, name: str, q: Tensor) -> Tensor:
        """Zero columns are replaced by random numbers, the same on all ranks.

        On a GPU they are made before the host knows whether any are needed, so they are made once,
        and are the same in each step.
        """
        is_empty = ~q.any(dim=0)
        if q.device.type != "cpu":
            start = self._starts.get(name)
            if start is None or start.shape != q.shape:
                start = self._starts[name] = self._random(f"{self.seed}/{name}", q)
            return torch.where(is_empty, start, q)
        if not is_empty.any():
            return q
        return torch.where(is_empty, self._random(f"{self.seed}/{self._step}/{name}", q), q)

    def _random(self, key: str, like: Tensor) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(key.encode()))
        return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(
            like
        )

    def _flush_residuals(self, matrices: list[_Matrix]) -> None:
        """One rank alone sends nothing: it adds its residuals."""
        for x in matrices:
            x.target.copy_(x.v.view(x.target.shape))
            self._next_q[x.name] = x.q
            x.v.zero_()

    def _reduce_p(self, matrices: list[_Matrix], comm: Ranks) -> None:
        """Sum each P at its owner, orthogonalise it there, and gather the results."""
        self.nonfinite.scan_each("encoding", [x.name for x in matrices], [x.p for x in matrices])
        owners = _owners([x.p.numel() for x in matrices], comm.size)
        chunks = [
            _joined([x.p for x, owner in zip(matrices, owners, strict=True) if owner == rank], like)
            for rank in range(comm.size)
            for like in [matrices[0].p]
        ]
        own = comm.reduce_scatter(chunks)
        shapes = [x.p.shape for x, o in zip(matrices, owners, strict=True) if o == comm.rank]
        for part in _parts(own, shapes):
            orthogonalise_(part)
        by_rank = comm.allgather(own)
        for rank, chunk in enumerate(by_rank):
            theirs = [x for x, owner in zip(matrices, owners, strict=True) if owner == rank]
            for x, part in zip(theirs, _parts(chunk, [x.p.shape for x in theirs]), strict=True):
                x.p = part

    def _reduce_q(
        self,
        matrices: list[_Matrix],
        others: list[tuple[str, Tensor]],
        comm: Ranks,
        dtype: torch.dtype,
    ) -> None:
        """Sum each Q together with the uncompressed tensors; write the results."""
        own_qs = [x.v.T @ x.p for x in matrices]
        plain = [tensor.to(dtype) for _, tensor in others]
        pieces = [*own_qs, *plain]
        names = [name for name, _ in others]
        self.nonfinite.scan_each("encoding", names, plain)
        total = comm.allreduce(_joined(pieces, pieces[0]))
        sums = _parts(total, [piece.shape for piece in pieces])
        for x, own_q, q in zip(matrices, own_qs, sums, strict=False):
            kernels = kernels_for(q.device.type)
            self._next_q[x.name] = q.clone()
            kernels.subtract_outer_(x.v, x.p, own_q)
            is_direct = x.target.dtype == dtype and x.target.is_contiguous()
            result = x.target.view(x.v.shape) if is_direct else torch.empty_like(x.v)
            kernels.outer_sum(x.p, q, result)
            if not is_direct:
                x.target.copy_(result.view(x.target.shape))
        for (_, tensor), summed in zip(others, sums[len(matrices) :], strict=True):
            tensor.copy_(summed)
        products = [x.name for x in matrices]
        self.nonfinite.scan_each("decoding", products, [x.p for x in matrices])
        self.nonfinite.scan_each("decoding", [*products, *names], sums)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank})"


def orthogonalise_(matrix: Tensor) -> None:
    """Make the columns of (n, r) orthonormal, in place: modified Gram-Schmidt, twice each.

    A column that is negligible after projection becomes zero; if not finite, NaN.
    """
    columns = matrix.double()
    for k in range(matrix.shape[1]):
        column, before = columns[:, k], columns[:, :k]
        length = column.norm()
        for _ in range(2):
            column -= before @ (before.T @ column)
        remaining = column.norm()
        is_negligible = remaining <= _NEGLIGIBLE * length
        column.copy_(torch.where(is_negligible, torch.zeros_like(column), column / remaining))
    matrix.copy_(columns)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _owners(sizes: list[int], num_ranks: int) -> list[int]:
    """For each matrix the rank that orthogonalises it: consecutive ones, about equal shares."""
    total, done, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append(min(num_ranks - 1, (2 * done + size) * num_ranks // (2 * total)))
        done += size
    return owners


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else like.new_empty(0)


def _parts(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of what `_joined` joined."""
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(joined.split(sizes), shapes, strict=True)]
