"""Whether parameters were changed: a number for each that is made of its bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmn.exchange.buckets import is_dense


def fingerprint(parameter: Tensor) -> Tensor:
    """A sum of its bits, as integers: not the same if any one element is changed. Local."""
    values = parameter.detach()
    if not is_dense(values):
        values = values.contiguous()
    flat = values.as_strided((values.numel(),), (1,))
    for kind in (torch.int64, torch.int32, torch.int16):
        if flat.nbytes % kind.itemsize == 0 and flat.data_ptr() % kind.itemsize == 0:
            break
    else:
        kind = torch.uint8
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat.view(kind).sum(dtype=torch.int64)


def differ(then: Sequence[Tensor], now: Sequence[Tensor]) -> list[bool]:
    """Which of the fingerprints are not the same any more. A device is waited for once. Local."""
    if len({each.device for each in (*then, *now)}) > 1:
        then, now = [each.cpu() for each in then], [each.cpu() for each in now]
    found: list[bool] = (torch.stack(list(then)) != torch.stack(list(now))).tolist() if then else []
    return found
