"""Memory of a host and the limits of control groups, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmn.cluster.memory import memory_of_host

MEMINFO = """\
MemTotal:       65536 kB
MemFree:            1 kB
MemAvailable:   32768 kB
HugePages_Total:    0
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/memory.max": "4096000\n",
                "sys/fs/cgroup/job/memory.high": "2048000\n",
            },
            2048000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu:/other\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192000\n",
                "sys/fs/cgroup/cpu/other/memory.limit_in_bytes": "1\n",
            },
            8192000,
        ),
    ],
)
def test_memory_of_a_host(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    found = memory_of_host(write(tmp_path, files))
    assert (found.total, found.available, found.limit) == (65536 << 10, 32768 << 10, limit)


def test_a_system_without_these_files(tmp_path: Path) -> None:
    found = memory_of_host(tmp_path)
    assert (found.total, found.available, found.limit) == (0, 0, None)
