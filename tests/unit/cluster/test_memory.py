"""Memory of a host and the limits of control groups, from files as the kernel writes them."""

from pathlib import Path

import pytest

from torchmn.cluster.cpus import count_memory_kills, describe_sigkill, memory_of_host

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


# ---- memory full distinguished from kill -9, by the counters of control groups ----


V2 = "0::/user.slice/job\n"
V1 = "5:cpu:/\n4:memory:/slurm/job\n0::/\n"


def write_group(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


@pytest.mark.parametrize("is_inside", [True, False], ids=["path of the host", "container"])
@pytest.mark.parametrize("own", [V2, V1])
def test_the_counter_decides(tmp_path: Path, own: str, is_inside: bool) -> None:
    mount, path, name = {
        V2: ("", "user.slice/job", "events"),
        V1: ("memory", "slurm/job", "oom_control"),
    }[own]
    write_group(tmp_path, own)
    mounted = tmp_path / "sys/fs/cgroup" / mount
    folder = mounted / path if is_inside else mounted
    folder.mkdir(parents=True, exist_ok=True)
    counter = folder / f"memory.{name}"
    counter.write_text("oom_group_kill 7\noom_kill 2\n")
    (folder / ("memory.max" if own == V2 else "memory.limit_in_bytes")).write_text(f"{3 << 29}\n")
    before = count_memory_kills(tmp_path)
    assert before == 2
    assert "sent by another process" in describe_sigkill(before, tmp_path)
    counter.write_text("oom_kill 3\n")
    assert describe_sigkill(before, tmp_path) == (
        "was ended by SIGKILL: the memory limit of its control group, 1.5 GiB, was exceeded"
    )


def test_without_counters_nothing_is_claimed(tmp_path: Path) -> None:
    write_group(tmp_path, V2)
    assert count_memory_kills(tmp_path) is None
    assert describe_sigkill(None, tmp_path) == ""
