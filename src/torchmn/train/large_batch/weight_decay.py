"""Parameter groups that leave normalization and biases without weight decay.

He et al., *Bag of Tricks for Image Classification*, 2018, arXiv 1812.01187, section 3.1; Goyal et
al., arXiv 1706.02677, section 5.1, leave out the parameters of normalization.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from torchmn.errors import UsageError


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: with weight decay, and normalization and biases without. Local.

    Without it are all parameters of at most one dimension: biases, and the scales and shifts of
    normalization layers of any class. Parameters stay in the order of the model, and frozen ones
    are included. A group without parameters is left out.

    ```python
    optimizer = torch.optim.SGD(weight_decay_groups(model, 1e-4), lr=0.1, momentum=0.9)
    ```

    Raises UsageError: ``weight_decay`` is negative, or a parameter is not initialised yet.

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
                f"Parameter '{name}' is not initialised yet, so its number of dimensions is not "
                "known. Run one forward pass first."
            )
        (others if parameter.dim() <= 1 else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
