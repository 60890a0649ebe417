"""Sparse CSR tensors of minibatches."""

from __future__ import annotations

import functools
import warnings

import torch


def csr_tensor(
    crow: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """A ``torch.sparse_csr`` tensor of indices that are known to be valid."""
    _ask_for_the_warning_once()
    return torch.sparse_csr_tensor(crow, columns, values, size, check_invariants=False)


@functools.cache
def _ask_for_the_warning_once() -> None:
    """PyTorch warns in each process that such tensors are a beta feature, which is our choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        torch.sparse_csr_tensor(nothing.new_zeros(1), nothing, nothing.float(), (0, 1))
