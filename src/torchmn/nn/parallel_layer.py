"""Layers whose channels are divided among ranks, and which look like the whole layer from outside.

All ranks give such a layer the same input and get the same output; what follows is the same on all
ranks, and so is the gradient that comes back. In between each rank has its channels only:

    split="output"    y = all_gather(layer of the own output channels (x))     dx = sum over ranks
    split="input"     y = sum over ranks(layer of the own input channels (own part of x))
                                                                               dx = all_gather

The other direction needs no message. So the gradients are those of one process with one loss, not
of the sum of the losses of all ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from torchmn.base.compiling import not_compiled
from torchmn.base.errors import RankMismatchError, UnsupportedError, UsageError, raise_if_unknown
from torchmn.base.torch_private import active_ddp
from torchmn.comm import Communicator
from torchmn.comm.local_tensors import Division, divide
from torchmn.data import shard_bounds
from torchmn.nn.layer_communicator import Ranks

Split = Literal["output", "input"]
_Map = Callable[[Tensor], Tensor]
_CURE = "Make the model again with its communicator, and load the state into it."


class ParallelLayer(nn.Module):
    """Base class of `ParallelLinear` and `ParallelConv2d`."""

    weight: Any
    bias: Any
    split: Split
    _ranks: Ranks
    # The modes (whether training) in which the inputs of ranks have been compared.
    _compared: tuple[bool, ...]

    @property
    def comm(self) -> Communicator | None:
        """The ranks that hold the layer together; None after loading from a pickle."""
        return self._ranks.comm

    def _divide(self, comm: Communicator, split: Split) -> None:
        """Keep this rank's part of a layer that was made whole, with whole initial values."""
        raise_if_unknown("split", split, get_args(Split))
        self.split, self._ranks = split, Ranks(comm)
        self._compared: tuple[bool, ...] = ()
        self._num_divided = self.weight.shape[self._dim]
        if self._num_divided < comm.size:
            raise UsageError(
                f"A layer of {self._num_divided} {split} channels cannot be divided among "
                f"{comm.size} ranks. Use fewer ranks (comm.split) or a layer of torch."
            )
        for name in self.divided_names():
            part = _narrowed(getattr(self, name).detach(), self._dim, comm)
            setattr(self, name, nn.Parameter(part.clone()))
        self._mark_parts()

    def _mark_parts(self) -> None:
        """Mark the parameters as parts, for code that compares, clips or averages parameters."""
        if self.comm is not None:
            for name in self.divided_names():
                parameter = self._parameters.get(name)
                if parameter is not None:
                    divide(parameter, Division(self.comm, self._dim))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called for copies, whose parameters are new objects."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parts()

    def _apply(self, *args: Any, **kwargs: Any) -> ParallelLayer:
        """See `nn.Module.to` and others, which may make new parameters."""
        applied: ParallelLayer = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._mark_parts()
        return applied

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See `nn.Module.load_state_dict`, which makes new parameters under ``assign=True``."""
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parts()

    @property
    def _dim(self) -> int:
        """The dimension of the weight that is divided."""
        return 0 if self.split == "output" else 1

    def divided_names(self) -> list[str]:
        """The parameters of which each rank has a part."""
        is_bias = self.split == "output" and self.bias is not None
        return ["weight", "bias"] if is_bias else ["weight"]

    def forward(self, input: Tensor) -> Tensor:
        """The output of the whole layer. *Collective*: all ranks give the same input.

        The first pass in training and the first in evaluation compare it, and the gradient of the
        output. Raises RankMismatchError: they differ.
        """
        channels = self._channel_dim(input)
        self._raise_if_parametrized()
        comm = _communicator(self)
        self._raise_if_averaged_by_torch(comm)
        is_first = comm.size > 1 and _is_first_pass(self)
        if is_first:
            raise_if_values_differ(input, comm, f"The input of a {type(self).__name__}")
        y = self._of_whole(input, comm, channels)
        if is_first:
            _compare_gradient(y, comm, f"The gradient of the output of a {type(self).__name__}")
        return y

    def _of_whole(self, input: Tensor, comm: Communicator, channels: int) -> Tensor:
        if self.split == "output":
            y = self._apply_part(_copy(input, comm), self.bias)
            return _gather(y, comm, channels)
        if input.shape[channels] != self._num_divided:
            raise UsageError(
                f"{type(self).__name__} takes {self._num_divided} input channels, got an input of "
                f"shape {list(input.shape)}. Every rank passes the whole input."
            )
        y = _sum(self._apply_part(_part(input, comm, channels), None), comm)
        # Under autocast y is in fewer bits than the bias, and so is the output of torch's layer.
        return y if self.bias is None else y + _by_channel(self.bias.to(y.dtype), y, channels)

    def reset_parameters(self) -> None:
        """Draw the values of the whole layer again, as torch's does, and keep this rank's. Local.

        Under the same ``torch.manual_seed`` on all ranks these are those of one process.
        """
        draw: Callable[[], None] = super().reset_parameters  # type: ignore[misc]
        if not hasattr(self, "_ranks"):  # called by torch's constructor: not divided yet
            return draw()
        self._raise_if_parametrized()
        parts: dict[str, nn.Parameter] = {
            name: getattr(self, name) for name in self.divided_names()
        }
        for name, part in parts.items():
            shape = [*part.shape]
            shape[self._dim] = self._num_divided
            self._parameters[name] = nn.Parameter(part.detach().new_empty(shape))
        draw()
        with torch.no_grad():
            for name, part in parts.items():
                part.copy_(self.own_part(getattr(self, name)))
                self._parameters[name] = part
        return None

    def gather_whole(self, name: str) -> Tensor:
        """A divided parameter as one process has it, on all ranks. *Collective.*"""
        self._raise_if_parametrized()
        comm = _communicator(self)
        return torch.cat(comm.allgather(getattr(self, name).detach()), self._dim)

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's part of a parameter of the whole layer. Local."""
        self._raise_if_parametrized()
        return _narrowed(whole, self._dim, self._ranks.required(self, _CURE))

    def _raise_if_parametrized(self) -> None:
        changed = [name for name in self.divided_names() if name not in self._parameters]
        if changed:
            raise UnsupportedError(
                f"'{changed[0]}' of a {type(self).__name__} is parametrized or pruned, which would "
                "see this rank's part alone and not the whole. Remove it "
                "(torch.nn.utils.parametrize.remove_parametrizations), or use a layer of torch."
            )

    @not_compiled
    def _raise_if_averaged_by_torch(self, comm: Communicator) -> None:
        """Raise UnsupportedError under DistributedDataParallel over ranks with different parts.

        It (and Lightning with it) broadcasts rank 0's part to all its ranks.
        """
        ddp = active_ddp()
        if ddp is None or comm.size == 1:
            return
        own = {comm.flight_recorder.job_ranks[rank] for rank in range(comm.size)}
        if len(own.intersection(dist.get_process_group_ranks(ddp.process_group))) > 1:
            raise UnsupportedError(
                f"{comm.rank_label}: DistributedDataParallel has made the parts of a "
                f"{type(self).__name__} equal on ranks that hold different ones. Give it the ranks "
                "with the same part (process_group=grid.data.process_group), or use "
                "create_multi_node_optimizer(optimizer, grid.data, model) without it."
            )

    def extra_repr(self) -> str:
        """The arguments of the whole layer and its division, for ``repr``."""
        whole: str = super().extra_repr()
        num_ranks = "no" if self.comm is None else self.comm.size
        return f"{whole}, split={self.split}, {num_ranks} ranks"

    def _channel_dim(self, x: Tensor) -> int:
        """The dimension of the input that holds channels."""
        raise NotImplementedError

    def _apply_part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply torch's layer with this rank's part of the weight."""
        raise NotImplementedError


@not_compiled
def _communicator(layer: ParallelLayer) -> Communicator:
    """The communicator of the layers over these ranks. *Collective* at the first call."""
    ranks = layer._ranks.layers(layer, _CURE)
    ranks.note_forward(layer)
    return ranks.comm


@not_compiled
def _is_first_pass(layer: ParallelLayer) -> bool:
    """Whether this is the first pass in this mode, training or evaluation. Local."""
    is_first = layer.training not in layer._compared
    if is_first:
        layer._compared += (layer.training,)
    return is_first


@not_compiled
def _compare_gradient(y: Tensor, comm: Communicator, what: str) -> None:
    """Compare the gradient of ``y`` over ranks, in the first backward pass."""
    if not y.requires_grad:
        return
    waiting = [what]  # emptied by the first pass: the hook runs in each backward through y

    def compare(dy: Tensor) -> None:
        if waiting:
            raise_if_values_differ(dy, comm, waiting.pop())

    y.register_hook(compare)


def gather_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state that one process would have: parallel layers are put together. *Collective.*

    All ranks get it. A model of plain layers loads it, and `load_whole_state_dict` on any number of
    ranks.

    Example:
        >>> layer = torchmn.nn.ParallelLinear(3, 2, comm)
        >>> torchmn.nn.gather_state_dict(layer)["weight"].shape  # of the whole layer
        torch.Size([2, 3])
    """
    state = dict(model.state_dict())
    for key, layer, name in _divided(model):
        state[key] = layer.gather_whole(name)
    return state


def load_whole_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Load a state of one process: each rank takes its part of parallel layers. *Collective.*

    Nothing is sent. Raises RuntimeError, as torch: names or shapes differ.

    Example:
        >>> layer = torchmn.nn.ParallelLinear(3, 2, comm)
        >>> torchmn.nn.load_whole_state_dict(layer, torch.nn.Linear(3, 2).state_dict())
    """
    own = dict(state)
    for key, layer, _ in _divided(model):
        if key in own:
            own[key] = layer.own_part(own[key])
    model.load_state_dict(own, strict=strict)


def _divided(model: nn.Module) -> Iterator[tuple[str, ParallelLayer, str]]:
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParallelLayer):
            for name in layer.divided_names():
                yield f"{prefix}.{name}" if prefix else name, layer, name


# ---- activations that all ranks have, and their parts ----


@not_compiled
def _copy(x: Tensor, comm: Communicator) -> Tensor:
    """Return x; its gradient is the sum of the gradients of all ranks."""
    return _with_reverse(x, lambda x: x.view_as(x), lambda dy: _sum(dy, comm))


@not_compiled
def _sum(x: Tensor, comm: Communicator) -> Tensor:
    """Sum x over ranks; each rank's gradient is that of the sum."""
    return _with_reverse(x, comm.allreduce, lambda dy: _copy(dy, comm))


@not_compiled
def _gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Concatenate the parts of all ranks; the gradient of a part is its part of the gradient."""
    return _with_reverse(
        x, lambda x: torch.cat(comm.allgather(x), dim), lambda dy: _part(dy, comm, dim)
    )


@not_compiled
def _part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks have; the gradients of parts are gathered."""
    return _with_reverse(
        x, lambda x: _narrowed(x, dim, comm).clone(), lambda dy: _gather(dy, comm, dim)
    )


def _with_reverse(x: Tensor, function: _Map, reverse: _Map) -> Tensor:
    """``function(x)``, whose gradient is ``reverse(dy)`` and can be differentiated again."""
    return _Linear.apply(x, function, reverse)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _Map, reverse: _Map) -> Tensor:
        ctx.reverse = reverse
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.reverse(dy), None, None


def _narrowed(whole: Tensor, dim: int, comm: Communicator) -> Tensor:
    begin, end = shard_bounds(whole.shape[dim], comm.size, comm.rank, force_equal_length=False)
    return whole.narrow(dim, begin, end - begin)


def _by_channel(bias: Tensor, y: Tensor, dim: int) -> Tensor:
    return bias.view(-1, *[1] * (y.dim() - 1 - dim % y.dim()))


# Whether ranks that must compute the same do so, by a sample of the values of a tensor.
#
# Ranks with other samples, or other dropout, would train something that no process has: a mistake
# of the script that no shape shows. Values may differ by rounding, as on other hardware.

_NUM_VALUES = 64
_TOLERANCE = 0.01  # of the largest value: more than rounding in 16 bits, less than another sample


@not_compiled
def raise_if_values_differ(x: Tensor, comm: Communicator, what: str) -> None:
    """Compare shapes and some values of ``x`` over ranks. *Collective.*

    Raises RankMismatchError on all ranks: they are not the same.
    """
    own = _sample(x)
    gathered = comm.allgather_obj((list(x.shape), own))
    seen = [f"shape {shape} on rank {rank}" for rank, (shape, _) in enumerate(gathered)]
    if all(shape == gathered[0][0] for shape, _ in gathered):
        first = gathered[0][1]
        finite = first[first.isfinite()].abs()
        atol = _TOLERANCE * float(finite.max()) if len(finite) else 0.0
        index = next(
            (
                int(is_close.logical_not().nonzero()[0])
                for _, values in gathered
                if not (is_close := first.isclose(values, 0.0, atol, equal_nan=True)).all()
            ),
            None,
        )
        if index is None:
            return
        seen = [f"{float(v[index]):.4g} on rank {rank}" for rank, (_, v) in enumerate(gathered)]
    raise RankMismatchError(
        f"{comm.rank_label}: {what} must be the same on all ranks that hold the layer, and is "
        f"{', '.join(seen)}. Give these ranks the same samples, as by a GlobalSampler over "
        "grid.data, and the same random numbers for dropout (torch.manual_seed)."
    )


def _sample(x: Tensor) -> Tensor:
    """At most 64 values, evenly spaced from the first to the last, as float64 on the CPU."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), min(_NUM_VALUES, len(flat)), device="cpu")
    return flat[places.long().to(flat.device)].double().cpu()


class ParallelLinear(ParallelLayer, nn.Linear):
    """`torch.nn.Linear` of which each rank holds and computes a part.

    All ranks give it the same input ``(..., in_features)`` and get the same output
    ``(..., out_features)``. Forward and backward are *collective*. Output, gradients and, under the
    same ``torch.manual_seed``, initial values are those of the whole layer in one process;
    ``weight`` and ``bias`` are this rank's part. Features need not be a multiple of the ranks.

    Args:
        in_features, out_features, bias, device, dtype: as in torch, of the whole layer.
        comm: the ranks that hold it together.
        split: ``output``: each rank has some output features, which are gathered at the end;
            ``input``: some input features, and the outputs are added up. Divide the larger of the
            two; ``input`` sends less where outputs are few.

    Raises UsageError: fewer features than ranks.

    >>> import torchmn
    >>> comm = torchmn.create_communicator()
    >>> layer = torchmn.nn.ParallelLinear(3, 7, comm, split="output")
    >>> layer(torch.rand(2, 3)).shape
    torch.Size([2, 7])
    >>> comm.finalize()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        *,
        split: Split = "output",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._divide(comm, split)

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - 1

    def _apply_part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)


class ParallelConv2d(ParallelLayer, nn.Conv2d):
    """`torch.nn.Conv2d` of which each rank holds and computes some channels.

    All ranks give it the same images ``(batch, in_channels, height, width)`` and get the same
    output. Forward and backward are *collective*. Output, gradients and, under the same
    ``torch.manual_seed``, initial values are those of the whole layer in one process; ``weight``
    and ``bias`` are this rank's part. Channels need not be a multiple of the ranks.

    Args:
        in_channels, out_channels, kernel_size: as in torch, of the whole layer.
        comm: the ranks that hold it together.
        split: ``output``: each rank has some output channels, which are gathered at the end;
            ``input``: some input channels, and the outputs are added up.
        options: those of `torch.nn.Conv2d`, such as ``stride``, ``padding`` and ``bias``.

    Raises UsageError: fewer channels than ranks; UnsupportedError: ``groups`` is not 1.

    Example:
        >>> layer = torchmn.nn.ParallelConv2d(3, 8, 3, comm, padding=1)
        >>> layer(torch.rand(2, 3, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        comm: Communicator,
        *,
        split: Split = "output",
        **options: Any,
    ) -> None:
        nn.Conv2d.__init__(self, in_channels, out_channels, kernel_size, **options)
        if self.groups != 1:
            raise UnsupportedError(
                f"ParallelConv2d with groups={self.groups}: channels of different groups are "
                "independent already. Use groups=1, or nn.Conv2d."
            )
        self._divide(comm, split)

    def _channel_dim(self, x: Tensor) -> int:
        return x.dim() - 3

    def _apply_part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self._conv_forward(x, self.weight, bias)
        return y
