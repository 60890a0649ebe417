"""The shards of the parameters, one for each server, and their host memory."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.torch_private import STEP_HOOKS
from torchmn.exchange.buckets import NamedParameter, plan_buckets

# The options of each parameter group that are plain values, such as the learning rate.
Hyper = list[dict[str, Any]]

# Options of a group that refer to tensors, or to how a device computes the update.
_NOT_SENT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def assign_shards(
    parameters: Sequence[NamedParameter], num_servers: int
) -> list[list[NamedParameter]]:
    """Distribute whole parameters among servers, about the same number of bytes to each. Local.

    In order of decreasing size, each parameter goes to the server with the fewest bytes so far, so
    that no server has more than 4/3 of the optimum (Graham 1969). A pure function with the same
    result on all ranks. Within a shard parameters keep their order. Shards may be empty.
    """
    nbytes = [0] * num_servers
    owners: dict[str, int] = {}
    for name, parameter in sorted(parameters, key=lambda item: (-item[1].nbytes, item[0])):
        owner = nbytes.index(min(nbytes))
        owners[name] = owner
        nbytes[owner] += parameter.nbytes
    return [[item for item in parameters if owners[item[0]] == s] for s in range(num_servers)]


class ShardMemory:
    """Host memory for the values, or the gradients, of some parameters; a flat buffer per dtype.

    ``slots[name]`` has the parameter's shape and shares memory with one of ``buffers``.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        planned = plan_buckets(
            parameters, granularity="everything", bucket_bytes=0, num_footer=0, allocate=_on_host
        )
        self._buckets = [bucket for bucket in planned if bucket.slots]
        self.buffers = [bucket.buffer for bucket in self._buckets]
        self.slots = {slot.name: slot.tensor for bucket in self._buckets for slot in bucket.slots}

    def fill(self, buffers: Sequence[Tensor]) -> None:
        """Copy the values from the buffers of memory for the same parameters."""
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            mine.copy_(theirs)


def _on_host(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the CPU; page-locked if the parameter is on a GPU, for fast copies."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda", device="cpu")


def optimizer_like(inner: Optimizer, copies: Mapping[Tensor, nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same class and options for copies of some parameters. Local.

    It has no state and no hooks. It has all groups, of which some may be empty.
    """
    clone: Optimizer = object.__new__(type(inner))
    # Not by its constructor: the arguments of a user's class are unknown.
    clone.__dict__.update(inner.__dict__)
    clone.__dict__.pop("step", None)  # LR schedulers wrap the method of one object
    clone.__dict__.update({name: OrderedDict() for name in STEP_HOOKS})
    clone.state = defaultdict(dict)
    clone.param_groups = []
    for group in inner.param_groups:
        own = {key: value for key, value in group.items() if key != "param_names"}
        own["params"] = [copies[p] for p in group["params"] if p in copies]
        if "capturable" in own:
            own["capturable"] = False
        if isinstance(own.get("lr"), Tensor):
            own["lr"] = own["lr"].item()
        clone.param_groups.append(own)
    return clone


def hyper_parameters(inner: Optimizer) -> Hyper:
    """The options of the optimizer's groups to be sent: plain values, and tuples of them."""
    return [_plain_options(group) for group in inner.param_groups]


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key in group.keys() - _NOT_SENT:
        value = group[key]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, list):
            value = tuple(value)  # a copy, with which later ones are compared
        items = value if isinstance(value, tuple) else (value,)
        if all(isinstance(item, (bool, int, float, str, type(None))) for item in items):
            found[key] = value
    return found


def host_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an optimizer's state of one parameter to the CPU."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def device_copy(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Copy an optimizer's state of one parameter to the parameter's device.

    Scalars, such as Adam's step count, stay on the CPU.
    """
    return {
        key: value.to(parameter.device)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
        else value
        for key, value in state.items()
    }
