"""What is done about gradients that are not finite, before the inner optimizer sees them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from torchmn.control import script_monitor
from torchmn.errors import NonFiniteGradientError
from torchmn.exchange.finiteness import NonfiniteGradients
from torchmn.exchange.reducer import GradientReducer

OnNonfinite = Literal["raise", "warn", "ignore"]
_MAX_IN_A_ROW = 100
"""A script that catches the error and meets it in this many steps does not train any longer."""


def record_own_nonfinite(reducer: GradientReducer, parameters: Iterable[Tensor]) -> None:
    """Find what is not finite on one rank alone, which exchanges nothing.

    Local; *collective over the ranks of the model* where it is sharded.
    """
    held = (reducer.parameters.of(parameter).grad for parameter in parameters)
    grads = [grad.detach().to_dense() for grad in held if grad is not None]
    names = []
    if not bool(torch.nn.utils.get_total_norm(grads).isfinite()):  # a GPU is waited for once
        names = [  # none, if only the norm was too large
            name
            for name, parameter in reducer.parameters.trained()
            if parameter.grad is not None and not bool(parameter.grad.to_dense().isfinite().all())
        ]
    reducer.means.record_problem(
        NonfiniteGradients(reducer.step, {0: names}) if names else None, reducer.step
    )


def act_on_nonfinite(reducer: GradientReducer, policy: OnNonfinite) -> None:
    """Raise NonFiniteGradientError or warn, once, if the current means are not finite. Local."""
    problem = reducer.means.nonfinite.take()
    if problem is None or policy == "ignore":
        return
    text = (
        f"{reducer.comm.rank_label}: {problem}. Lower the learning rate, clip (max_grad_norm=), or "
        "scale the loss with torch.amp.GradScaler; with on_nonfinite='warn' or 'ignore' training "
        "continues."
    )
    if policy == "raise":
        error = NonFiniteGradientError(text)
        if reducer.means.nonfinite.num_in_a_row() == _MAX_IN_A_ROW:
            script_monitor.exchange_failed(error)
        raise error
    warnings.warn(text, RuntimeWarning, stacklevel=5)
