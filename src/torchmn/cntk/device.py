"""CNTK's ``cntk.device``: devices of torch by CNTK's names.

There is no default device: move the model, ``model.to(C.device.gpu(0))``; the trainer moves
minibatches to it.
"""

import torch

__all__ = ["all_devices", "cpu", "gpu"]


def cpu() -> torch.device:
    """The CPU."""
    return torch.device("cpu")


def gpu(device_id: int) -> torch.device:
    """A GPU of this machine by its number."""
    return torch.device("cuda", device_id)


def all_devices() -> list[torch.device]:
    """The GPUs that this process sees, then the CPU."""
    return [*map(gpu, range(torch.cuda.device_count())), cpu()]
