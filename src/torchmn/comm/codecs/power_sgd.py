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
    """The methods of a communicator that PowerSGD needs. All methods are *collective*."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def reduce_scatter(self, xs: Sequence[Tensor]) -> Tensor:
        """Sum ``xs[r]`` over all ranks; returns the sum on rank r."""

    def allgather(self, x: Tensor) -> Sequence[Tensor]:
        """Gather ``x``, as returned by `reduce_scatter`, from all ranks, in rank order."""

    def allreduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over all ranks; bit-identical on all ranks."""


@dataclass
class _Matrix:
    """A gradient in an exchange. ``v`` (n, m) is M_i + R_i, and later the new residual."""

    name: str
    target: Tensor
    v: Tensor
    q: Tensor
    p: Tensor


class PowerSGD(Codec):
    """A low-rank codec for whole matrices, not stripes. Each exchange needs an object of its own.

    ``rank`` is the r of the formulas. Needs 8 bytes of memory per element, and Q. ``seed`` must be
    the same on all ranks.

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
        """Q of the current exchange, which becomes valid in `finish`."""
        self._starts: dict[str, Tensor] = {}
        """On GPUs: random matrices whose columns replace columns of Q that are zero."""

    def mean_(self, named_matrices: Iterable[tuple[str, Tensor]], comm: Ranks) -> None:
        """Replace every tensor by its mean over ranks, in place. *Collective.*

        Tensors may have any shape and are float32, float64 or 16-bit. With two or more dims they
        are treated as the matrix (first dim, product of the others). All ranks must pass the same
        names and shapes in the same order.
        """
        named = list(named_matrices)
        for _, tensor in named:
            tensor.div_(comm.size)
        self.sum_(named, comm)

    def sum_(self, named_matrices: Iterable[tuple[str, Tensor]], comm: Ranks) -> None:
        """Replace every tensor by its sum over ranks, in place. *Collective.*

        The tensors are this rank's shares of the mean. They are computed in their own precision,
        even inside `torch.autocast`.
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
        """End an exchange: keep its residuals and Q, or discard them. See `Codec.finish`."""
        super().finish(is_valid=is_valid)
        self._residuals.finish(is_valid=is_valid)
        if isinstance(is_valid, Tensor):
            for name, q in self._next_q.items():
                self._q[name] = torch.where(is_valid, q, self._q[name])
        elif is_valid:
            self._q.update(self._next_q)
        self._next_q.clear()
        self._step += isinstance(is_valid, Tensor) or is_valid

    def warm_up(self, layout: Layout, device: torch.device) -> None:
        kernels_for(device.type)

    def new_instance(self) -> PowerSGD:
        return PowerSGD(self.rank, seed=self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Copies of Q and the residuals by name. `residuals.reshard` accepts these states, too."""
        residuals = self._residuals.state_dict()
        names = [entry["name"] for entry in residuals]
        return {
            "step": self._step,
            "q": {name: self._q[name].clone() for name in names if name in self._q},
            "residuals": residuals,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; an empty dict resets."""
        self._step = int(state.get("step", 0))
        self._q = {name: q.clone() for name, q in state.get("q", {}).items()}
        self._next_q.clear()
        self._residuals.load_state_dict(state.get("residuals", []))

    # ---- one exchange ----

    def _is_worth_compressing(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or is_small(tensor.shape):
            return False
        # P and Q must have at most half of the elements of the matrix.
        n = tensor.shape[0]
        return 2 * self.rank * (n + tensor.numel() // n) <= tensor.numel()

    def _begin(self, name: str, tensor: Tensor) -> _Matrix:
        """Begin the exchange of a matrix: add the residual and multiply by Q."""
        wide = tensor.reshape(tensor.shape[0], -1).to(_wide(tensor))
        layout = Layout((Segment(name, 0, wide.numel()),), wide.dtype)
        self._residuals.scale = self.total_scale
        block = self._residuals.block("worker", layout, wide.device)
        # In the memory of the new residual, which it becomes when `_reduce_q` subtracts P Q_i'.
        v = torch.add(wide, block.current.view_as(wide), out=block.pending.view_as(wide))
        block.is_written = True
        q = self._q.get(name)
        if q is None or q.shape != (wide.shape[1], self.rank):  # none yet, or of another rank
            q = wide.new_zeros(wide.shape[1], self.rank)
        q = self._q[name] = q.to(wide)
        start = self._without_zero_columns(name, q).double()  # squares of 1e-25 vanish in 32 bits
        return _Matrix(name, tensor, v, q, v @ (start / start.norm(dim=0)).to(v))

    def _without_zero_columns(self, name: str, q: Tensor) -> Tensor:
        """Replace zero columns of Q by random numbers that are the same on all ranks.

        On a GPU the host does not know whether any are needed. The random numbers are therefore
        generated once and are the same in each step.
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
        # On the CPU, so that ranks with different GPUs get the same numbers.
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(key.encode()))
        return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(
            like
        )

    def _flush_residuals(self, matrices: list[_Matrix]) -> None:
        """For a single rank, which sends nothing: add the residuals to the gradients."""
        for x in matrices:
            x.target.copy_(x.v.view(x.target.shape))
            self._next_q[x.name] = x.q
            x.v.zero_()

    def _reduce_p(self, matrices: list[_Matrix], comm: Ranks) -> None:
        """Sum each P on its owner, orthogonalise it there, and gather the results on all ranks."""
        self.nonfinite.scan_each("encoding", [x.name for x in matrices], [x.p for x in matrices])
        owners = _owners([x.p.numel() for x in matrices], comm.size)
        chunks = [
            _joined([x.p for x, owner in zip(matrices, owners, strict=True) if owner == rank], like)
            for rank in range(comm.size)
            for like in [matrices[0].p]
        ]
        own = comm.reduce_scatter(chunks)
        shapes = [x.p.shape for x, o in zip(matrices, owners, strict=True) if o == comm.rank]
        # At one rank, whose bytes all ranks use: replicas are equal even if CPUs round differently.
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
        """Sum every Q and the uncompressed tensors in one all-reduce, and write the results."""
        own_qs = [x.v.T @ x.p for x in matrices]
        plain = [tensor.to(dtype) for _, tensor in others]
        pieces = [*own_qs, *plain]
        names = [name for name, _ in others]
        self.nonfinite.scan_each("encoding", names, plain)
        total = comm.allreduce(_joined(pieces, pieces[0]))
        sums = _parts(total, [piece.shape for piece in pieces])
        for x, own_q, q in zip(matrices, own_qs, sums, strict=False):
            kernels = kernels_for(q.device.type)
            self._next_q[x.name] = q.clone()  # q is a view, which would keep all of `total`
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
    """Make the columns of a matrix (n, r) orthonormal, in place.

    Uses modified Gram-Schmidt with two projections of each column. A column that is negligible
    after projection becomes zero; a column that is not finite becomes NaN.
    """
    columns = matrix.double()
    for k in range(matrix.shape[1]):
        column, before = columns[:, k], columns[:, :k]
        length = column.norm()
        # A single projection leaves rounding errors, which matter if little of the column remains.
        for _ in range(2):
            column -= before @ (before.T @ column)
        remaining = column.norm()
        is_negligible = remaining <= _NEGLIGIBLE * length
        column.copy_(torch.where(is_negligible, torch.zeros_like(column), column / remaining))
    matrix.copy_(columns)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _owners(sizes: list[int], num_ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix, in order, with about equal shares."""
    total, done, owners = sum(sizes), 0, []
    for size in sizes:
        owners.append(min(num_ranks - 1, (2 * done + size) * num_ranks // (2 * total)))
        done += size
    return owners


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else like.new_empty(0)


def _parts(joined: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views into the result of `_joined`, with their shapes."""
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(joined.split(sizes), shapes, strict=True)]
