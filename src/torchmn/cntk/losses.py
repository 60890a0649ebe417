"""CNTK's losses and metrics: one value for each sample, which `Trainer` averages over all ranks."""

import torch
from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.cntk.readers.minibatch import MinibatchData

__all__ = ["classification_error", "cross_entropy_with_softmax", "squared_error"]


def cross_entropy_with_softmax(
    output_vector: Tensor, target_vector: Tensor | MinibatchData
) -> Tensor:
    """The cross entropy of softmax(output) and the target, per sample: ``(num_samples,)``. Local.

    Args:
        output_vector: ``(num_samples, classes)``, before softmax.
        target_vector: a distribution or one-hot ``(num_samples, classes)``, dense or sparse CSR; or
            class numbers ``(num_samples,)``.

    Raises UsageError: shapes that do not belong together.

    Example:
        >>> loss = cross_entropy_with_softmax(torch.zeros(2, 4), torch.tensor([0, 3]))
        >>> [round(each, 4) for each in loss.tolist()]
        [1.3863, 1.3863]
    """
    target = _tensor(target_vector)
    classes = _classes_of(target, output_vector)
    if target.layout == torch.sparse_csr:
        rows, columns, values = _entries(target)
        log_p = torch.log_softmax(output_vector, dim=-1)
        picked = -log_p[rows, columns] * values
        return log_p.new_zeros(log_p.shape[0]).index_add(0, rows, picked)
    wanted = target.to(output_vector.dtype) if classes is None else classes
    return nn.functional.cross_entropy(output_vector, wanted, reduction="none")


def classification_error(
    output_vector: Tensor, target_vector: Tensor | MinibatchData, topN: int = 1
) -> Tensor:
    """1 where the target's class is not among the ``topN`` largest outputs, else 0, per sample.

    Local. Arguments and Raises as `cross_entropy_with_softmax`.

    Example:
        >>> outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> classification_error(outputs, torch.tensor([0, 1])).tolist()
        [0.0, 1.0]
    """
    target = _tensor(target_vector)
    classes = _classes_of(target, output_vector)
    if classes is None:
        dense = target.to_dense() if target.layout == torch.sparse_csr else target
        classes = dense.argmax(-1)
    if topN == 1:
        return (output_vector.argmax(-1) != classes).float()
    found = output_vector.topk(topN, dim=-1).indices
    return (found != classes.unsqueeze(1)).all(-1).float()


def squared_error(output: Tensor, target: Tensor | MinibatchData) -> Tensor:
    """The sum of the squared differences of each sample: ``(num_samples,)``. Local.

    Raises UsageError: output and target have different shapes.

    Example:
        >>> squared_error(torch.ones(2, 3), torch.zeros(2, 3)).tolist()
        [3.0, 3.0]
    """
    wanted = _tensor(target)
    wanted = wanted.to_dense() if wanted.layout == torch.sparse_csr else wanted
    if wanted.shape != output.shape:
        raise UsageError(
            f"squared_error: the output has shape {tuple(output.shape)} and the target "
            f"{tuple(wanted.shape)}. They must be equal."
        )
    return (output - wanted).pow(2).reshape(output.shape[0], -1).sum(1)


def _tensor(value: Tensor | MinibatchData) -> Tensor:
    return value.data if isinstance(value, MinibatchData) else value


def _classes_of(target: Tensor, output: Tensor) -> Tensor | None:
    """The target as class numbers, if it is some."""
    if target.dim() == 1 and output.dim() == 2 and not target.is_floating_point():
        matches = target.shape[0] == output.shape[0]
        classes: Tensor | None = target.long()
    else:
        matches, classes = target.shape == output.shape and output.dim() == 2, None
    if not matches:
        raise UsageError(
            f"The output has shape {tuple(output.shape)} and the target {tuple(target.shape)} "
            f"({target.dtype}). The output must be (samples, classes), and the target the same "
            "(one-hot or a distribution) or integers (samples,)."
        )
    return classes


def _entries(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of a sparse CSR tensor."""
    counts = target.crow_indices().diff()
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    return rows, target.col_indices(), target.values()
