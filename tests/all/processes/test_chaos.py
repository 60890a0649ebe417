"""Runs of `make chaos`, with faults of several classes: trainings interrupted and resumed."""

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import limit

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

Inject = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def inject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inject]:
    """Executes a run with a fault of this kind and returns its record. All share one reference."""
    folder = tmp_path_factory.mktemp("chaos")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        faults, run, settings, testbed = (
            importlib.import_module(f"chaos.{name}")
            for name in ("faults", "run", "settings", "testbed")
        )
        references = run.References(folder)
        with testbed.open_testbed() as place:
            if testbed.has_hosts():
                assert len(place.lab.hosts) == 2  # made here, for it stays to the end

            def inject_(kind: str, seed: int, **setting: Any) -> dict[str, Any]:
                if kind == "network cut" and not testbed.has_hosts():
                    pytest.skip(reason="test hosts cannot be made here: they need root")
                if kind == "disk full" and not testbed.has_disks():
                    pytest.skip(reason="a small disk cannot be mounted here: that needs root")
                chosen = settings.Setting(
                    num_steps=32, period_steps=4, timeout_s=limit(6.0), **setting
                )
                fault = faults.fault_of(kind, chosen, random.Random(seed))
                transcript = folder / f"{kind}.txt"
                record: dict[str, Any] = run.run(chosen, fault, place, references, transcript)
                assert not record["problems"], (record, transcript.read_text()[-6000:])
                assert record["bit_equal"]
                return record

            yield inject_


@pytest.mark.parametrize(
    ("kind", "seed", "setting"),
    [("kill", 11, {}), ("disk full", 4, {}), ("network cut", 6, {"workers": (1, 1)})],
)
def test_faults(inject: Inject, kind: str, seed: int, setting: dict[str, Any]) -> None:
    record = inject(kind, seed, **setting)
    assert record["detection_s"] is not None if kind == "disk full" else record["named"]


def test_flipped_byte(inject: Inject) -> None:
    record = inject("flipped byte", 5)
    assert record["flipped"].startswith("step-")
    assert record["resumed_at"] > 0
