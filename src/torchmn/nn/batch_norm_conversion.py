"""Batch normalization of a model that changes its class in place, to another one and back.

The layers stay the same objects. Only exact classes change: what a lazy layer, a parametrized one
or another subclass adds would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from torchmn.errors import UnsupportedError

Model = TypeVar("Model", bound=nn.Module)
OfTorch = Mapping[type[nn.Module], type[nn.Module]]
"""The class that each of `nn.BatchNorm1d`, 2d and 3d changes to."""


def convert_layers(model: nn.Module, base: type[nn.Module], of_torch: OfTorch) -> list[Any]:
    """Change the layers of torch. Returns all layers of a class derived from ``base``.

    Raises UnsupportedError, before anything is changed: the model has batch normalization of
    another class.
    """
    found: list[nn.Module] = []
    for name, module in model.named_modules():
        if type(module) in of_torch or isinstance(module, base):
            found.append(module)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedError(
                f"'{name or 'the model'}' is a {type(module).__name__}, not exactly an "
                "nn.BatchNorm1d, 2d or 3d, and cannot be converted. Replace it by one of these: "
                "run a lazy one once, revert a multi-node or ghost one (revert_batch_norm, "
                "revert_ghost_batch_norm), and parametrize after converting."
            )
    for module in found:
        module.__class__ = of_torch.get(type(module), type(module))
    return found


def revert_layers(model: nn.Module, base: type[nn.Module], of_torch: OfTorch) -> list[Any]:
    """Change all layers of a class derived from ``base`` to those of torch. Returns them.

    Raises UnsupportedError, before anything is changed: a layer is of a subclass.
    """
    to_torch = {own: torch_class for torch_class, own in of_torch.items()}
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, base)]
    for name, module in found:
        if type(module) not in to_torch:
            raise UnsupportedError(
                f"'{name or 'the model'}' is a {type(module).__name__}, not exactly a "
                f"{of_torch[nn.BatchNorm1d].__name__}, 2d or 3d, and cannot be reverted. Remove "
                "its parametrizations, or load its state into a layer of torch."
            )
    for _, module in found:
        module.__class__ = to_torch[type(module)]
    return [module for _, module in found]
