"""GPUs are counted from device files and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmn.cluster import count_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 3),
        ("", 0),
        ("0,2", 2),
        ("-1", 0),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-x", 1),
        ("none", 0),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0-x"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(env, tmp_path) == expected


def test_no_devices(tmp_path: Path) -> None:
    assert count_gpus({}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, tmp_path) == 0
