"""Replicas: models and optimizers are compared over ranks, and start from rank 0's values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import CommunicationError, RankMismatchError, UnsupportedError, UsageError
from torchmn.base.torch_private import buffers_of, non_persistent_buffers
from torchmn.comm import Communicator
from torchmn.comm.checksums import checksum, differences, digest
from torchmn.comm.collectives import bcast_where_different
from torchmn.comm.local_tensors import (
    PART,
    from_part,
    is_distributed,
    is_part,
    local_part,
    part_of,
    placement_of,
    reshard,
    with_parts,
)
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.sparse_gradients import sparse_parameters

_OF_SHARDS = (
    " A model of which ranks hold parts is exchanged between those that hold the same part: give "
    "the communicator of an axis across, as grid.data of torchmn.Grid(comm, data=-1, model=2)."
)


_LEFT = " (no longer in the model)"


def named_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by name, prefixed by the model's number if there are several."""
    reshard(models)
    return {
        prefix + name: tensor
        for prefix, model in zip(_prefixes(models), models, strict=True)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def named_parameters(
    inner: Optimizer, models: Sequence[nn.Module], former: Sequence[NamedParameter] = ()
) -> list[NamedParameter]:
    """The optimizer's parameters with the model's names, in the model's order. Local.

    ``former`` are parameters that were in the model, and may have left it since: their layer was
    replaced.

    Raises UsageError: a parameter is not in the model; UnsupportedError: one is not initialized.
    """
    reshard(models)
    names = {
        parameter: prefix + name
        for prefix, model in zip(_prefixes(models), models, strict=True)
        for name, parameter in model.named_parameters()
    }
    for name, parameter in former:
        names.setdefault(parameter, f"{name.removesuffix(_LEFT)}{_LEFT}")
    wanted = set()
    for group_index, group in enumerate(inner.param_groups):
        for position, parameter in enumerate(group["params"]):
            is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
            if parameter not in names:
                label = group.get("param_names", {position: f"number {position}"})[position]
                shape = "not known yet" if is_lazy else list(parameter.shape)
                raise UsageError(
                    f"Parameter {label} of the optimizer's group {group_index}, shape {shape}, is "
                    "not in the model. Pass what owns it as the third argument of "
                    "create_multi_node_optimizer: the model, a list of models, or the tensor "
                    "itself where no model owns it, as [model, tensor]."
                )
            if is_lazy:
                raise UnsupportedError(
                    f"Parameter '{names[parameter]}' is not initialized yet. Run one forward pass "
                    "before create_multi_node_optimizer."
                )
            wanted.add(parameter)
    return [(name, parameter) for parameter, name in names.items() if parameter in wanted]


def raise_if_ranks_differ(
    comm: Communicator, models: Sequence[nn.Module], inner: Optimizer, asked: Mapping[str, object]
) -> None:
    """Compare over ranks all that determines what a rank sends. *Collective.*

    That is names, shapes, dtypes and strides of the tensors, which of them are trained, the options
    of the optimizer, and the options in ``asked``; and the options of torch's layers, such as the
    rate of a dropout, without which ranks would train different functions. Raises RankMismatchError
    on all ranks, naming the first difference and the values on both ranks.
    """
    trained = set(parameters_of(inner))
    named = named_tensors(models)
    tensors = {name: _describe(tensor, trained) for name, tensor in named.items()}
    sparse = sparse_parameters(models)
    for name, tensor in named.items():
        if tensor in sparse:
            tensors[name] += ", with sparse gradients"
    settings = {name: str(value) for name, value in asked.items()} | _options(inner)
    gathered = _gathered_if_different(comm, [settings, tensors, _layers(models)])
    for rank in range(1, len(gathered)):
        what = _first_difference("the models", gathered[0][1], gathered[rank][1], rank)
        # A layer without tensors that not all ranks have, as a metric of rank 0, may be used.
        layers, others = gathered[0][2], gathered[rank][2]
        common = {name: others[name] for name in layers if name in others}
        layers = {name: layers[name] for name in common}
        what = what or _first_difference("the models", layers, common, rank)
        what = what or _first_difference("the optimizers", gathered[0][0], gathered[rank][0], rank)
        if what:
            is_sharded = any(placement_of(tensor) for tensor in trained)
            raise RankMismatchError(
                f"{comm.rank_label}: {what}. All ranks must build the same model and the same "
                f"optimizer.{_OF_SHARDS if is_sharded else ''}"
            )


def _prefixes(models: Sequence[nn.Module]) -> list[str]:
    return [""] if len(models) == 1 else [f"{i}." for i in range(len(models))]


def _layers(models: Sequence[nn.Module]) -> dict[str, str]:
    """The classes and options of the layers that torch defines, by name. Local."""
    return {
        prefix + name: f"{type(layer).__name__}({layer.extra_repr()})"
        for prefix, model in zip(_prefixes(models), models, strict=True)
        for name, layer in model.named_modules()
        if type(layer).__module__.startswith("torch.nn.modules.")
    }


def _describe(tensor: Tensor, trained: set[nn.Parameter]) -> str:
    local = local_part(tensor)
    text = f"{list(local.shape)} {tensor.dtype}{placement_of(tensor)}"
    if not local.is_contiguous():
        text += f" with strides {list(local.stride())}"
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        text += ", frozen"
    if isinstance(tensor, nn.Parameter) and tensor not in trained:
        text += ", not in the optimizer"
    return text


def _options(inner: Optimizer) -> dict[str, str]:
    """The class and the plain options of every group, as text."""
    options = {"class": type(inner).__qualname__}
    for index, group in enumerate(inner.param_groups):
        options[f"size of group {index}"] = str(len(group["params"]))
        for name, value in group.items():
            # A rate may be a tensor on each rank's own GPU, whose number would differ in the text.
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if name != "params" and isinstance(value, (bool, int, float, str, tuple, type(None))):
                options[f"{name} of group {index}"] = repr(value)
    return options


def _first_difference(
    kind: str, reference: Mapping[str, str], other: Mapping[str, str], rank: int
) -> str | None:
    for name in (*reference, *other):
        if reference.get(name) != other.get(name):
            return (
                f"{kind} of the ranks differ in '{name}': rank 0 has "
                f"{reference.get(name, 'none')}, rank {rank} has {other.get(name, 'none')}"
            )
    if list(reference) != list(other):
        return f"{kind} of rank 0 and rank {rank} hold the same things in another order"
    return None


def broadcast_and_verify(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Copy rank 0's parameters and buffers to all ranks, then compare those sent. *Collective.*

    Raises CommunicationError: a tensor differs after the broadcast.
    """
    different: list[str] = []
    for model in models:
        tensors = named_tensors([model])
        sent = bcast_where_different(comm, model)
        # Compared again: a tensor with overlapping memory, as `expand` makes it, may not hold what
        # was copied into it, and ranks would train different models without a message.
        different += _different_of(comm, {name: tensors[name] for name in sent})
    if different:
        raise CommunicationError(
            f"{comm.rank_label}: after the broadcast ranks still differ in {different[:5]}. Memory "
            "or network is faulty, or a tensor has overlapping memory."
        )


def broadcast_optimizer_state(comm: Communicator, inner: Optimizer) -> None:
    """Copy rank 0's optimizer state to all ranks, if theirs differ. *Collective.*

    They differ if a file was loaded on rank 0 alone, or if ranks made different steps before.
    """
    # Compared first: Adam's state is twice as large as the model, and it is the same on all ranks
    # if they have loaded it from one file.
    state = inner.state_dict()
    mine = {
        name: checksum([value]) if isinstance(value, Tensor) else repr(value)
        for name, value in _leaves("", state.get("state", state))
    }
    if _gathered_if_different(comm, mine):
        whole = comm.bcast_obj(with_parts(inner.state_dict()) if comm.rank == 0 else None)
        if comm.rank != 0:
            load_inner_state(inner, whole)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values in nested dicts, lists and tuples, each with its path."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _leaves(f"{path}.{key}", inside)
    elif isinstance(value, (list, tuple)):
        for index, inside in enumerate(value):
            yield from _leaves(f"{path}.{index}", inside)
    else:
        yield path, value


def load_inner_state(inner: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer state; for a DTensor parameter this rank takes its part. Local.

    The state may hold DTensors, the parts of a rank at the same place of the mesh (`with_parts`),
    or whole tensors. Raises UnsupportedError: a part has another shape than that of its parameter.
    """
    if "state" not in state:  # a wrapper nests the state of its optimizer
        inner.load_state_dict(dict(state))
        return
    parameters = parameters_of(inner)
    values = {
        index: {
            name: _placed(value, parameters[index], type(inner).__name__)
            for name, value in values.items()
        }
        if isinstance(values, Mapping) and index in range(len(parameters))
        else values
        for index, values in state["state"].items()
    }
    inner.load_state_dict({**state, "state": values})


def _placed(value: Any, like: Tensor, optimizer: str) -> Any:
    """One value of a parameter's state, converted to a DTensor if the parameter is one."""
    if not is_distributed(like) or is_distributed(value):
        return value
    if is_part(value):
        local = value[PART]
        if list(value["shape"]) != list(like.shape) or local.shape != local_part(like).shape:
            raise UnsupportedError(
                f"A state of {optimizer} has shape {value['shape']}, of which this rank holds "
                f"{list(local.shape)}, beside a parameter of shape {list(like.shape)}, of which it "
                f"holds {list(local_part(like).shape)}: only states that are placed as their "
                "parameters are loaded. Use an optimizer with such a state, as Adam."
            )
        return from_part(local.to(like.device), like)
    if isinstance(value, Tensor) and value.dim() and value.shape == like.shape:
        return from_part(part_of(value, like).to(like.device), like)
    return value


def different_tensors(comm: Communicator, models: Sequence[nn.Module]) -> list[str]:
    """Names of the tensors that are not bit-identical on all ranks. *Collective.*"""
    return _different_of(comm, named_tensors(models))


def _different_of(comm: Communicator, tensors: Mapping[str, Tensor]) -> list[str]:
    mine = {name: checksum([tensor]) for name, tensor in tensors.items()}
    gathered = _gathered_if_different(comm, mine)
    return [difference.name for difference in differences(gathered)]


def _gathered_if_different(comm: Communicator, mine: Any) -> list[Any]:
    """The values of all ranks, in rank order; empty if all are equal. *Collective.*

    Values must be plain JSON, whose order counts. If all are equal only digests are sent: the lists
    of all tensors of all ranks would be large.
    """
    digests = comm.allgather_obj(digest(json.dumps(mine).encode()))
    return comm.allgather_obj(mine) if len(set(digests)) > 1 else []


def copy_state_from_rank(
    comm: Communicator,
    tensors: Sequence[Tensor],
    inner: Optimizer,
    source: int,
    *,
    is_behind: bool | None = None,
) -> None:
    """Copy tensors and the optimizer's state from rank ``source`` to others. *Collective.*

    ``is_behind``: whether this rank takes them, because it lacks steps; by default all ranks but
    the source do.
    """
    # All ranks take part, also those that take nothing: only some know who is behind.
    is_source = comm.rank == source
    state = comm.bcast_obj(with_parts(inner.state_dict()) if is_source else None, source)
    held = comm.bcast_obj([local_part(t.detach()) for t in tensors] if is_source else None, source)
    if is_behind or (is_behind is None and not is_source):
        with torch.no_grad():
            for tensor, value in zip(tensors, held, strict=True):
                # In place: the optimizer, hooks and compiled code refer to this memory.
                local_part(tensor).copy_(value)
        load_inner_state(inner, state)


class OwnBuffer(NamedTuple):
    """A buffer identified by its module and name, as a script may replace the tensor."""

    name: str
    """The full name, including the path of the module."""
    module: nn.Module
    key: str

    def get(self) -> Tensor | None:
        """Return the current tensor. Local."""
        return buffers_of(self.module).get(self.key)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups. Local."""
    return [*chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))]


def persistent_buffers(model: nn.Module) -> Iterator[OwnBuffer]:
    """Yield the buffers in a model's ``state_dict``: not those with ``persistent=False``. Local."""
    for path, module in model.named_modules():
        for key in buffers_of(module):
            if key not in non_persistent_buffers(module):
                yield OwnBuffer(f"{path}.{key}" if path else key, module, key)
