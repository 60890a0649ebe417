"""The base class of LARS and LAMB, and parameter groups without weight decay for any optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.base.errors import UnsupportedError, UsageError
from torchmn.comm.local_tensors import is_distributed, is_divided


class TrustRatioOptimizer(Optimizer):
    """An optimizer whose rate is adapted to the norm of each parameter. Subclasses update."""

    averages: tuple[str, ...]
    """The names of the averages of gradients in the state of a parameter, which begin at 0."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. Raises UsageError before that: an option is out of range."""
        if isinstance(param_group, dict):
            self._raise_if_out_of_range({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @staticmethod
    @abstractmethod
    def _raise_if_out_of_range(options: dict[str, Any]) -> None:
        """Raise UsageError: an option of a group is out of range."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters. Local.

        Raises UnsupportedError: a gradient is sparse, or a parameter is sharded, a part of a
        parallel layer, or not real.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            adapted: list[Tensor] = []
            others: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                _raise_if_unsupported(parameter)
                is_adapted = parameter.dim() > 1 or not group["exclude_vectors"]
                (adapted if is_adapted else others).append(parameter)
            if adapted:
                self._update(group, adapted, group["weight_decay"], is_adapted=True)
            if others:
                self._update(group, others, 0.0, is_adapted=False)
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter in this step, created in the first one."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update({name: torch.zeros_like(parameter) for name in self.averages})
        return state

    @abstractmethod
    def _update(
        self,
        group: dict[str, Any],
        params: list[Any],
        weight_decay: float,
        *,
        is_adapted: bool,
    ) -> None:
        """Update parameters of a group, with one call of torch for all of them at a time."""


def raise_if_negative(options: dict[str, Any], names: Sequence[str]) -> None:
    """Raise UsageError: an option is negative or NaN."""
    for name in names:
        if not options[name] >= 0:
            raise UsageError(f"{name}={options[name]} must be 0 or more.")


def norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norms by one call, shape ``(tensors,)``, on the device of the tensors."""
    is_half = tensors[0].dtype in (torch.float16, torch.bfloat16)  # too small for a large layer
    return torch.stack(list(torch._foreach_norm(tensors, 2, torch.float32 if is_half else None)))


def ratios(numerator: Tensor, denominator: Tensor, factor: float = 1.0) -> list[Any]:
    """The quotients times ``factor``, 1 where either is 0, by which tensors are multiplied.

    They are numbers on a CPU, and tensors on a GPU, so that the host need not wait.
    """
    is_defined = (numerator > 0) & (denominator > 0)
    quotient = torch.where(is_defined, factor * numerator / denominator, 1.0)
    return list(quotient.unbind()) if quotient.is_cuda else quotient.tolist()


def _raise_if_unsupported(parameter: Tensor) -> None:
    if is_divided(parameter) or is_distributed(parameter):
        kind = "a part of a parallel layer" if is_divided(parameter) else "sharded (a DTensor)"
        raise UnsupportedError(
            "LARS and LAMB adapt the rate to the norm of whole layers, and this parameter, shape "
            f"{list(parameter.shape)}, is {kind}. Train it whole, or use another optimizer."
        )
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UnsupportedError(
            f"The gradient of a parameter of shape {list(parameter.shape)} is sparse. LARS and "
            "LAMB need dense ones: make the Embedding with sparse=False."
        )
    if parameter.is_complex():
        raise UnsupportedError(
            f"A parameter of shape {list(parameter.shape)} is complex; LARS and LAMB are for real "
            "ones."
        )


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with weight decay, and without it for biases and normalization. Local.

    Parameters of at most one dimension get no weight decay: biases, and the scales and shifts of
    normalization layers of any class (He et al. 2018, arXiv 1812.01187, section 3.1; Goyal et al.,
    arXiv 1706.02677, section 5.1). Parameters stay in the order of the model, and frozen ones are
    included. A group without parameters is left out.

    ```python
    optimizer = torch.optim.SGD(weight_decay_groups(model, 1e-4), lr=0.1, momentum=0.9)
    ```

    Raises UsageError: ``weight_decay`` is negative, or a parameter is not initialized yet.

    Example:
        >>> groups = torchmn.train.large_batch.weight_decay_groups(torch.nn.Linear(3, 2), 1e-4)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.0001, 1), (0.0, 1)]
    """
    if not weight_decay >= 0:
        raise UsageError(f"weight_decay={weight_decay} must be 0 or more.")
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"Parameter '{name}' is not initialized yet, so its number of dimensions is not "
                "known. Run one forward pass first."
            )
        (others if parameter.dim() <= 1 else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
