"""How many NVIDIA GPUs this process may use, found without a library. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def count_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Number of GPUs after ``CUDA_VISIBLE_DEVICES``. Local.

    Device files are counted, since importing a framework would take seconds. As in CUDA, the
    list ends at its first entry that is no device.

    Example:
        >>> count_gpus({"CUDA_VISIBLE_DEVICES": ""})
        0
    """
    numbers = {path.name[6:] for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()}
    num_gpus = len(numbers)
    if num_gpus == 0 and (devices / "dxg").exists():  # Windows' subsystem for Linux
        num_gpus = 1
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < num_gpus):
            count += 1
        else:
            break
    return count if num_gpus else 0
