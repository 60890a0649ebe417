"""What is done about gradients that are not finite, before the inner optimizer sees them."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from torchmn.errors import NonFiniteGradientError
from torchmn.gradients.nonfinite import NonfiniteGradients
from torchmn.gradients.reducer import GradientReducer
from torchmn.monitor import script_monitor

OnNonfinite = Literal["raise", "warn", "ignore"]
_MAX_IN_A_ROW = 100
"""A script that catches the error and meets it in this many steps does not train any longer."""


def record_own_nonfinite(reducer: GradientReducer) -> None:
    """Find what is not finite on one rank alone, which exchanges nothing. Local."""
    grads = {
        name: parameter.grad.detach().to_dense()
        for name, parameter in reducer.parameters.trained()
        if parameter.grad is not None
    }
    sums = [grad.sum().abs().double().cpu() for grad in grads.values()]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return
    # None, if only a sum was too large.
    names = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    if names:
        reducer.nonfinite.record(NonfiniteGradients(reducer.step, {0: names}))


def act_on_nonfinite(reducer: GradientReducer, policy: OnNonfinite) -> None:
    """Raise NonFiniteGradientError or warn, once, if the current means are not finite. Local."""
    problem = reducer.nonfinite.take()
    if problem is None or policy == "ignore":
        return
    text = (
        f"{reducer.comm.rank_label}: {problem}. Lower the learning rate, clip (max_grad_norm=), or "
        "scale the loss with torch.amp.GradScaler; with on_nonfinite='warn' or 'ignore' training "
        "continues."
    )
    if policy == "raise":
        error = NonFiniteGradientError(text)
        if reducer.nonfinite.num_in_a_row() == _MAX_IN_A_ROW:
            script_monitor.exchange_failed(error)
        raise error
    warnings.warn(text, RuntimeWarning, stacklevel=5)
