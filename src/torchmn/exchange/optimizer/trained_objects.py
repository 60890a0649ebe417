"""The objects that an optimizer trains, as modules: tensors that no module owns are wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator

Trained = Union[nn.Module, Tensor, "Sequence[Trained]", "Mapping[str, Trained]"]
"""Modules and tensors, single or in nested lists and dicts."""


class TrainedTensors(nn.Module):
    """A module for tensors that no module owns: an image, latent codes, weights of losses."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def named_parameters(self, prefix: str = "", *_: Any, **__: Any) -> Iterator[Any]:
        """Yield each tensor, which need not be an `nn.Parameter`, with a numbered name."""
        for number, tensor in enumerate(self._tensors):
            yield f"{prefix}{'.' if prefix else ''}tensor_{number}", tensor


def modules_of(trained: Trained, comm: Communicator) -> list[nn.Module]:
    """Return the modules, and one more that holds all tensors. Local.

    Raises UsageError: there is an object of another class, or nothing.
    """
    found = list(_leaves(trained, comm))
    modules = [each for each in found if isinstance(each, nn.Module)]
    tensors = [each for each in found if isinstance(each, Tensor)]
    return [*modules, TrainedTensors(tensors)] if tensors else modules


def _leaves(trained: object, comm: Communicator) -> Iterator[nn.Module | Tensor]:
    if isinstance(trained, (nn.Module, Tensor)):
        yield trained
    elif isinstance(trained, (Mapping, list, tuple)) and trained:
        for each in trained.values() if isinstance(trained, Mapping) else trained:
            yield from _leaves(each, comm)
    else:
        what = f"an object of class {type(trained).__name__}" if trained else "nothing"
        raise UsageError(
            f"{comm.rank_label}: the third argument of create_multi_node_optimizer holds {what}. "
            "It names what the optimizer trains: the module (rather than module.parameters(), "
            "which lack its buffers), or, where no module owns a parameter, the tensor itself; "
            "several in a list, as [model, log_variances]."
        )
