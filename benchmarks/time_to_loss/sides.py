"""How each side exchanges. Model, data, optimizer and learning rate are the same script's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from exchange.sides import torchft_manager
from torch import nn

from time_to_loss.settings import BATCH, Side


@dataclass
class Training:
    """``model`` is called with tokens, ``optimizer`` stepped.

    ``wait`` returns when nothing of an exchange is under way.
    """

    model: nn.Module
    optimizer: Any
    wait: Callable[[], object] = lambda: None


def build(side: Side, model: nn.Module, inner: torch.optim.Optimizer) -> Training:
    """Wrap model or optimizer. *Collective.* Raises ImportError: a peer is not installed."""
    return _BUILDERS[side.build](model, inner, side.options)


def _ddp(model: nn.Module, inner: torch.optim.Optimizer, options: Mapping[str, Any]) -> Training:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options["hook"]:
        wrapped.register_comm_hook(None, getattr(default_hooks, f"{options['hook']}_compress_hook"))
    return Training(wrapped, inner)


def _torchft(
    model: nn.Module, inner: torch.optim.Optimizer, options: Mapping[str, Any]
) -> Training:
    """Its bytes that are under way at a validation cost it nothing."""
    manager = torchft_manager()
    from torchft.local_sgd import DiLoCo

    fragments = halves(model) if options["fragments"] == 2 else [model]
    outer = [_nesterov(options["outer"], list(part.parameters())) for part in fragments]
    schedule = DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=options["block"],
        use_bucketization=True,
        fragment_sync_delay=options["delay"],
        fragment_update_alpha=options["alpha"],
    )
    schedule.__enter__()
    return Training(model, inner)


def halves(model: nn.Module) -> list[nn.Module]:
    """Two fragments of about as many parameters, in order."""
    parameters = list(model.parameters())
    numels = list(itertools.accumulate(p.numel() for p in parameters))
    middle = next(index for index, numel in enumerate(numels, 1) if 2 * numel >= numels[-1])
    return [nn.ParameterList(parameters[:middle]), nn.ParameterList(parameters[middle:])]


def _nesterov(outer: tuple[float, float], parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    rate, momentum = outer
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)


def _gradients(
    model: nn.Module, inner: torch.optim.Optimizer, options: Mapping[str, Any]
) -> Training:
    import torchmn

    comm = torchmn.create_communicator()
    optimizer = torchmn.create_multi_node_optimizer(
        inner, comm, model, schedule=options["schedule"], codec=options["codec"]
    )
    return Training(model, optimizer, optimizer.flush)


def _diloco(model: nn.Module, inner: torch.optim.Optimizer, options: Mapping[str, Any]) -> Training:
    import torchmn
    from torchmn.exchange.schedules import DiLoCo

    comm = torchmn.create_communicator()
    schedule = DiLoCo(
        options["block"] * BATCH,
        outer=partial(_nesterov, options["outer"]),
        num_fragments=options["fragments"],
        overlap_steps=options["overlap"],
        eager=options.get("eager", False),
    )
    optimizer = torchmn.create_multi_node_optimizer(
        inner, comm, model, schedule=schedule, codec=options["codec"]
    )
    # A barrier is queued after whatever is under way; flush() would end the block early.
    return Training(model, optimizer, comm.barrier)


_BUILDERS = {"ddp": _ddp, "torchft": _torchft, "gradients": _gradients, "diloco": _diloco}
