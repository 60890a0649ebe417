"""The devices of a MultiprocessParallelUpdater, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchmn.errors import UnsupportedError, UsageError

Device = int | str | torch.device


def named_devices(devices: Mapping[str, Device] | Sequence[Device]) -> dict[str, torch.device]:
    """Devices by name, main first. Raises UsageError, UnsupportedError: not usable together."""
    if isinstance(devices, Mapping):
        if "main" not in devices:
            raise UsageError(
                f"devices has the keys {', '.join(map(repr, devices))}. One must be 'main': the "
                "device that steps the optimizer."
            )
        named = {"main": devices["main"], **devices}
    elif isinstance(devices, (list, tuple)) and devices:
        named = {("main" if i == 0 else f"gpu{i}"): device for i, device in enumerate(devices)}
    else:
        raise UsageError(
            f"devices={devices!r} should be a dict with 'main', or a list with main first."
        )
    found = {name: _device(device) for name, device in named.items()}
    kinds = {device.type for device in found.values()}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise UnsupportedError(
            f"devices are {', '.join(map(str, found.values()))}. All must be GPUs or all CPUs."
        )
    gpus = [device.index for device in found.values() if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise UnsupportedError(f"GPUs {gpus}: NCCL needs one rank per GPU. Name each GPU once.")
    num_gpus = torch.cuda.device_count() if gpus else 0
    if gpus and max(gpus) >= num_gpus:
        raise UsageError(f"There is no GPU {max(gpus)}: this machine shows {num_gpus}.")
    return found


def _device(device: Device) -> torch.device:
    if isinstance(device, int):
        return torch.device("cpu") if device < 0 else torch.device("cuda", device)
    found = torch.device(device)
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found
