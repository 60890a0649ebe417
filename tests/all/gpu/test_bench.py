"""`make bench-gpu`, on CPUs with tiny models: all parts run and give their figures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

ROOT = Path(__file__).parents[3]
OUT = ROOT / "benchmarks" / "out" / "gpu_smoke.json"

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]


def measured(*parts: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_gpu.py", "--smoke", "--parts", ",".join(parts)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=limit(380),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {bar["bar"]: bar for bar in json.loads(OUT.read_text())["bars"]}


def test_all_parts_on_two_ranks() -> None:
    bars = measured("kernels", "waits", "memory", "speed")
    for name in (
        "int8: encode, of the bandwidth of a copy",
        "diloco: waits of the host in a step",
        "wide_mlp: peak memory, every_step / ddp, both with views",
        "gpt: speed, every_step_view / ddp_view",
        "resnet50: speed, every_step / ddp",
        "mlp, compiled: speed, every_step_view / ddp_view",
    ):
        found = [bar for bar in bars if bar.replace("+residual", "") == name]
        assert found, f"{name}: {[*bars]}"
        assert bars[found[0]]["value"] is not None
    peak = bars["wide_mlp: peak memory, every_step / ddp, both with views"]["value"]
    assert 0.8 < peak < 1.3  # of tensors that Python knows
    assert bars["wide_mlp, every_step_view: left after close()"]["value"] < 0.1


def test_paced_connections_in_place_of_test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu.paced_ranks import MAX_PACING_RATE, pace

    def rate_of(each: socket.socket) -> int:
        found = each.getsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, 4)
        return int.from_bytes(found, sys.byteorder)

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as other,
    ):
        before = rate_of(server)
        assert pace(12_500_000) >= 2
        assert [rate_of(each) for each in (sender, other)] == [12_500_000] * 2
        assert rate_of(server) == before, "it has no connection"


def test_slow_links() -> None:
    """On test hosts, or without root by paced connections."""
    bars = measured("links")
    for side in ("every_step", "int8", "1bit", "diloco_int8"):
        assert bars[f"gpt over 1gbit: {side} / ddp"]["value"] > 0
        assert bars[f"gpt over 1gbit: {side} / alone"]["value"] > 0
        for part in ("wait", "send", "copy, alone"):
            assert bars[f"gpt over 1gbit: {side}: {part}"]["value"] > 0
    for part in ("encode", "decode"):
        assert bars[f"gpt over 1gbit: int8: {part}"]["value"] > 0
    assert bars["gpt over 100mbit: int8 / ddp"]["value"] > 0
    assert "gpt over 100mbit: every_step / ddp" not in bars  # 40 s with the real one
