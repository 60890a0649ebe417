"""`make bench-gpu`, on CPUs with tiny models: all parts run and give their figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit
from tests.netlab import missing_requirement

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


@pytest.mark.root
@pytest.mark.skipif(missing_requirement() is not None, reason="test hosts cannot be made here")
def test_slow_links() -> None:
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
