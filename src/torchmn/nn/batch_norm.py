"""Batch normalization with the mean and variance of the batches of all ranks.

With n_r values of a channel on rank r, their mean m_r and their sum of squared deviations q_r,
Chan, Golub and LeVeque (1979) give those of all values without subtracting large numbers:

    n = sum n_r      m = sum n_r m_r / n      q = sum q_r + n_r (m_r - m)^2

Every rank sends (n_r, m_r, q_r) to all others once, in float64, and adds in rank order, so that all
ranks have the same bits. Inside of a rank values are shifted by their own rounded mean first: what
follows works on small numbers, whatever the mean is. Backward sends two sums for each channel.

torch's SyncBatchNorm needs GPUs, rounds m_r to float32 and fails for an empty batch on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import UnsupportedError, raise_if_unknown
from torchmn.base.torch_private import BatchNorm
from torchmn.comm import Communicator
from torchmn.nn.layer_communicator import LayerCommunicator, Ranks, differentiable_once
from torchmn.nn.micro_batches import samples_of_loss

LossWeight = Literal["rank", "samples"]

_FORWARD, _BACKWARD = range(2)
_CURE = "Call torchmn.nn.convert_batch_norm(model, comm) after loading."
_TWICE = (
    "The gradient of a batch normalization over ranks was differentiated again, which is possible "
    "in eval mode only. Call eval() of these layers for a gradient penalty, or use torch's layers."
)
_MAX_FEATURES = 2**32


class _MultiNode(BatchNorm):
    """Base class of the layers for all dimensions."""

    _ranks: Ranks
    loss_weight: LossWeight
    _number: int | None

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        loss_weight: LossWeight = "rank",
    ) -> None:
        raise_if_unknown("loss_weight", loss_weight, get_args(LossWeight))
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        _join_ranks(self, comm, loss_weight)

    @property
    def comm(self) -> Communicator | None:
        """The ranks whose batches count together; None after loading from a pickle."""
        return self._ranks.comm

    def forward(self, input: Tensor) -> Tensor:
        """Normalize. *Collective* in training mode: every rank calls it, with any batch size.

        Raises:
            ValueError: all batches together have one value per channel, or ``input`` has another
                number of dimensions than the layer takes.
            UsageError: the layer was loaded from a pickle and has no communicator yet.
            RankMismatchError: ranks run different layers.
        """
        comm = self._ranks.comm
        if not self.training or (comm is not None and comm.size == 1):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return _normalize(self, input)

    def extra_repr(self) -> str:
        """The arguments and the number of ranks, for ``repr``."""
        num_ranks = "no" if self.comm is None else self.comm.size
        of_torch: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{of_torch}, {num_ranks} ranks, loss_weight={self.loss_weight}"


class MultiNodeBatchNorm1d(_MultiNode, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` over the batches of all ranks; see `MultiNodeBatchNorm2d`.

    Example:
        >>> torchmn.nn.MultiNodeBatchNorm1d(3, comm)(torch.rand(5, 3)).shape
        torch.Size([5, 3])
    """


class MultiNodeBatchNorm2d(_MultiNode, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` over the batches of all ranks, of any sizes, empty ones included.

    Outputs, gradients and running statistics are those of one process that has the whole batch.
    In training mode forward and backward are *collective*, one message of a few KiB to each other
    rank: all ranks run the same layers in the same order, also those without samples. In eval mode
    nothing is sent. Arguments, parameters, buffers and state dict are those of the layer of torch.

    Args:
        num_features: channels, dimension 1 of the input.
        comm: the ranks whose batches count together: all, or those of a node by ``comm.split``.
        eps, momentum, affine, track_running_stats, device, dtype: as in torch.
        loss_weight: which loss is differentiated: with ``rank`` the sum of the losses of all ranks,
            with ``samples`` each is weighted by the rows of its rank's input (dimension 0). Give
            what the optimizer was given as ``weight``. `set_weight` of the optimizer takes
            precedence.

    >>> import torchmn
    >>> comm = torchmn.create_communicator()
    >>> layer = torchmn.nn.MultiNodeBatchNorm2d(3, comm)
    >>> layer(torch.rand(5, 3, 2, 2)).shape
    torch.Size([5, 3, 2, 2])
    >>> comm.finalize()
    """


class MultiNodeBatchNorm3d(_MultiNode, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` over the batches of all ranks; see `MultiNodeBatchNorm2d`.

    Example:
        >>> torchmn.nn.MultiNodeBatchNorm3d(3, comm)(torch.rand(5, 3, 2, 2, 2)).shape
        torch.Size([5, 3, 2, 2, 2])
    """


Model = TypeVar("Model", bound=nn.Module)
_OF_TORCH: dict[type[nn.Module], type[_MultiNode]] = {
    nn.BatchNorm1d: MultiNodeBatchNorm1d,
    nn.BatchNorm2d: MultiNodeBatchNorm2d,
    nn.BatchNorm3d: MultiNodeBatchNorm3d,
}


def convert_batch_norm(
    model: Model, comm: Communicator, *, loss_weight: LossWeight = "rank"
) -> Model:
    """Make every `nn.BatchNorm1d`, 2d and 3d of a model a multi-node one, in place. Local.

    Returns the model. The layers stay the same objects, with their parameters, statistics and
    hooks, so optimizers and references to them stay valid. Layers that are multi-node already get
    this communicator. For a converted copy, pass ``copy.deepcopy(model)``. ChainerMN's
    ``create_mnbn_model`` is another name of this function.

    Args:
        model: it may be a batch normalization itself.
        comm: the ranks whose batches count together.
        loss_weight: see `MultiNodeBatchNorm2d`.

    Raises, before anything is changed:
        UnsupportedError: the model has batch normalization of another class, such as SyncBatchNorm,
            a lazy one or a subclass.
        UnknownNameError: ``loss_weight`` is neither.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> type(torchmn.nn.convert_batch_norm(model, comm)[1]).__name__
        'MultiNodeBatchNorm1d'
    """
    raise_if_unknown("loss_weight", loss_weight, get_args(LossWeight))
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        # Only exact classes change: what a lazy layer or another subclass adds would be lost.
        if type(module) in _OF_TORCH or isinstance(module, _MultiNode):
            found.append(module)
        elif isinstance(module, BatchNorm):
            raise UnsupportedError(
                f"'{name or 'the model'}' is a {type(module).__name__}, not exactly an "
                "nn.BatchNorm1d, 2d or 3d, and cannot be converted. Replace it by one of these: "
                "run a lazy one once, and parametrize after converting."
            )
    for module in found:
        module.__class__ = _OF_TORCH.get(type(module), type(module))
        _join_ranks(module, comm, loss_weight)
    return model


create_mnbn_model = convert_batch_norm


def weigh_losses_by(model: nn.Module, given_weight: Callable[[], float | None]) -> None:
    """Let every layer call ``given_weight`` in backward for the weight of this rank's loss. Local.

    If it returns None, ``loss_weight`` applies.
    """
    for layer in model.modules():
        if isinstance(layer, _MultiNode):
            layer._ranks.given_weight = given_weight


def revert_batch_norm(model: Model) -> Model:
    """Make every multi-node batch normalization one of torch, in place. Local.

    Returns the model, for use in one process or for export. The layers stay the same objects, with
    their parameters, statistics and hooks.

    Raises UnsupportedError, before anything is changed: a layer is of a subclass, as after
    `torch.nn.utils.parametrize`.

    Example:
        >>> layer = torchmn.nn.convert_batch_norm(torch.nn.BatchNorm1d(4), comm)
        >>> type(torchmn.nn.revert_batch_norm(layer)).__name__
        'BatchNorm1d'
    """
    to_torch: dict[type[nn.Module], type[nn.Module]] = {own: t for t, own in _OF_TORCH.items()}
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, _MultiNode)
    ]
    for name, layer in layers:
        if type(layer) not in to_torch:
            raise UnsupportedError(
                f"'{name or 'the model'}' is a {type(layer).__name__}, not exactly a "
                "MultiNodeBatchNorm1d, 2d or 3d, and cannot be reverted. Remove its "
                "parametrizations, or load its state into a layer of torch."
            )
    for _, layer in layers:
        layer.__class__ = to_torch[type(layer)]
        del layer._ranks, layer.loss_weight, layer._number
    return model


def _join_ranks(module: Any, comm: Communicator, loss_weight: LossWeight) -> None:
    module._ranks, module.loss_weight, module._number = Ranks(comm), loss_weight, None


# ---- the computation ----


@not_compiled
def _normalize(layer: _MultiNode, x: Tensor) -> Tensor:
    """The output of a layer in training mode; updates its statistics. *Collective.*"""
    ranks = layer._ranks.layers(layer, _CURE)
    if layer._number is None:
        layer._number = ranks.new_layer()
    ranks.note_forward(layer)
    apply: Any = _BatchNorm.apply
    normalized: tuple[Tensor, Tensor] = apply(x, layer.weight, layer.bias, layer, ranks)
    y, statistics = normalized
    if layer.track_running_stats:
        _update_running(layer, statistics)
    return y


def _update_running(layer: _MultiNode, statistics: Tensor) -> None:
    """Update running statistics as torch does, from the rows n, mean and q of a batch."""
    count, mean, deviation = statistics
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(count[0] > 0)
    if layer.running_mean is None or layer.running_var is None:
        return
    factor = layer.momentum
    if factor is None:
        factor = 1.0 / max(float(layer.num_batches_tracked), 1.0)  # type: ignore[arg-type]
    variance = deviation / (count - 1).clamp_(min=1)
    for running, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        new = running * (1 - factor) + value * factor
        running.copy_(torch.where(count > 0, new, running))


class _BatchNorm(torch.autograd.Function):
    """y = weight * (x - m) / sqrt(q / n + eps) + bias, with statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: _MultiNode,
        ranks: LayerCommunicator,
    ) -> tuple[Tensor, Tensor]:
        features = layer.num_features
        x = _contiguous(x)
        shift, shifted = _shift(x)
        own_sum, own_squares = _sums(shifted, shifted, torch.zeros_like(shift))
        own_count = x.numel() // features
        own_mean = own_sum / max(own_count, 1)  # of what is shifted
        row = x.new_empty(2 + 2 * features, dtype=torch.float64)
        row[0], row[1] = _call(layer, _FORWARD), own_count
        row[2 : 2 + features] = own_mean + shift
        row[2 + features :] = own_squares - own_sum * own_mean
        table = ranks.gather_rows(row, _described)
        counts, means = table[:, 1:2], table[:, 2 : 2 + features]
        count = counts.sum(0)
        mean = (counts * means).sum(0).div_(count.clamp(min=1))
        deviation = (table[:, 2 + features :] + counts * (means - mean).square()).sum(0)
        if not count.is_cuda and count == 1:  # reading it would make the host wait for the GPU
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 on all ranks together"
            )
        variance = deviation / count.clamp(min=1)
        center = (mean - shift).to(shifted.dtype)
        y = _affine(shifted, weight, bias, center, variance, layer.eps).to(x.dtype)
        ctx.is_shifted = shifted.dtype == x.dtype
        ctx.layer, ctx.ranks, ctx.num_samples = layer, ranks, samples_of_loss(x)
        inverse = (variance + layer.eps).rsqrt_()
        ctx.save_for_backward(
            shifted if ctx.is_shifted else x, shift, center, inverse, count, weight, bias
        )
        statistics = torch.stack([count.expand_as(mean), mean, deviation])
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    @differentiable_once(_TWICE)
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved, shift, center, inverse, count, weight, bias = ctx.saved_tensors
        shifted = saved if ctx.is_shifted else _shift(saved, shift)[1]
        dtype = dy.dtype
        dy = dy.to(shifted.dtype)
        dy = dy.contiguous(memory_format=_memory_format(shifted))
        own_sum, own_product = _sums(dy, shifted, center)
        dx = None
        if ctx.needs_input_grad[0]:
            layer = ctx.layer
            own_weight = layer._ranks.given_weight()
            if own_weight is None:
                own_weight = ctx.num_samples if layer.loss_weight == "samples" else 1
            row = torch.cat([own_sum.new_zeros(1), own_sum, own_product])
            row = row.mul_(own_weight) if own_weight else row.zero_()  # 0 * NaN would be NaN
            row[0] = _call(layer, _BACKWARD)
            table = ctx.ranks.gather_rows(row, _described)
            # A rank of weight 0 has a gradient that counts for nothing.
            scale = 1 / (count.clamp(min=1) * (own_weight or 1))
            mean_sum, mean_product = table[:, 1:].sum(0).mul_(scale).split(layer.num_features)
            # dx = factor * (dy - mean_sum - (shifted - center) * inverse^2 * mean_product)
            factor = inverse if weight is None else inverse * weight
            slope = -factor * inverse.square() * mean_product
            offset = -factor * mean_sum - slope * center
            dx = _affine(shifted, slope, offset, torch.zeros_like(center))
            dx = dx.addcmul_(dy, _by_channel(factor.to(dy.dtype), dy)).to(dtype)
        own = ctx.needs_input_grad
        dweight = (own_product * inverse).to(weight.dtype) if own[1] else None
        dbias = own_sum.to(bias.dtype) if own[2] else None
        return dx, dweight, dbias, None, None


def _call(layer: _MultiNode, direction: int) -> int:
    """Encode layer, direction and features as one number, which float64 holds exactly."""
    return ((layer._number or 0) * 2 + direction) * _MAX_FEATURES + layer.num_features


def _described(call: int) -> str:
    number, features = divmod(call, _MAX_FEATURES)
    way = ("forward", "backward")[number % 2]
    return f"{way} of batch normalization {number // 2} ({features} features)"


# ---- torch's kernels, which add up in float64 on CPUs ----


def _shift(x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Shift each channel by its rounded mean, or by ``shift``; return the shift and the values.

    Both are at least in float32.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if shift is None:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shift = wide.mean(dims) if x.numel() else wide.new_zeros(x.shape[1])
    return shift, wide - _by_channel(shift, wide)


def _sums(dy: Tensor, x: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of dy and of dy * (x - center) over all but channels, in float64."""
    if not x.numel():
        nothing = center.new_zeros(center.shape, dtype=torch.float64)
        return nothing, nothing
    ones = torch.ones_like(center)
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, center, ones, center, ones, False, 0.0, [False, True, True]
    )
    return total.double(), product.double()


def _affine(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    center: Tensor,
    variance: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """weight * (x - center) / sqrt(variance + eps) + bias by channel, in the dtype of x."""
    if not x.numel():
        return torch.empty_like(x)
    scale, offset, squares = (
        None if tensor is None else tensor.to(x.dtype) for tensor in (weight, bias, variance)
    )
    squares = torch.ones_like(center) if squares is None else squares
    return torch.native_batch_norm(x, scale, offset, center, squares, False, 0.0, eps)[0]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _memory_format(x: Tensor) -> torch.memory_format:
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        is_last = x.dim() == dims and x.is_contiguous(memory_format=memory_format)
        if is_last and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_memory_format(x))
