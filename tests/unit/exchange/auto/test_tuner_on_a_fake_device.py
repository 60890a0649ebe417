"""`auto` on a device that runs late: its choice follows the device's clock, not the host's."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from tests.unit.comm.fake_device import FakeDevice
from tests.unit.exchange.test_on_a_fake_device import (
    ArrivesLate,
    OneStep,
    buckets_on_device,
    equal,
    on_device,
    trained,
)
from torchmn.exchange import replica_divergence
from torchmn.exchange.auto import tuner
from torchmn.record.timeline import GpuClock

NUM_STEPS = tuner.NUM_WARM_UP + tuner.NUM_TIMED + 3 * (1 + tuner.NUM_TIMED) + 2
ONE_BUCKET, MANY_BUCKETS = 10_000, 100
_of_rank = threading.local()  # ranks are threads


class DeviceEvent:
    """An event of the device of this rank, at the number of operations that were run before it."""

    def record(self) -> None:
        self.at: int | None = None
        self._device: FakeDevice | None = getattr(_of_rank, "device", None)
        if self._device is None:
            self.at = 0
        else:
            self._device.queue(self._pass)

    def _pass(self) -> bool:
        assert self._device is not None
        self.at = self._device.num_done
        return True

    def query(self) -> bool:
        if self.at is None and self._device is not None:
            self._device.begin()
        return self.at is not None

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.at is not None
        assert end.at is not None
        return 1e3 * (end.at - self.at)


@pytest.fixture
def tuners(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Those of all ranks, which measure by the clock of their device."""
    made: list[tuner.Autotuner] = []
    monkeypatch.setattr(tuner, "clock_of", lambda kind: GpuClock(DeviceEvent, lambda: False))
    # A checksum of a GPU goes into the footer on the GPU; this device's tensors look like a CPU's.
    monkeypatch.setattr(replica_divergence, "EVERY", 1000)

    def begin(optimizer, comm, streams, nccl) -> None:
        on_device(optimizer, comm, streams, nccl)
        _of_rank.device = streams.device
        use = optimizer.tuner._use

        def use_on_device(plan) -> None:
            use(plan)
            buckets_on_device(optimizer, streams)

        optimizer.tuner._use = use_on_device
        made.append(optimizer.tuner)

    return SimpleNamespace(begin=begin, made=made)


@pytest.mark.parametrize("order", ["caller first", "exchange first"])
@pytest.mark.parametrize("best", [ONE_BUCKET, MANY_BUCKETS])
def test_the_plan_with_the_least_work_of_the_device_is_selected(
    tuners, best: int, order: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Fewer buckets are fewer operations, whatever the host's clock says."""
    default = MANY_BUCKETS if best == ONE_BUCKET else ONE_BUCKET
    expected = trained(None, order, num_steps=NUM_STEPS)
    monkeypatch.setattr(OneStep, "bucket_bytes", default)
    monkeypatch.setattr(tuner, "BUCKET_BYTES", (best,))
    caplog.set_level(logging.INFO, "torchmn")
    found = trained(
        ArrivesLate, order, begin=tuners.begin, num_steps=NUM_STEPS, schedule="auto", codec="auto"
    )
    assert equal(found, expected)
    for each in tuners.made:
        assert each.plan is not None
        assert each.plan.bucket_bytes == ONE_BUCKET
        assert len(each.trials) == 4
        for trial in each.trials:
            assert trial.step_s == round(trial.step_s, 1) >= 10  # operations, not seconds
    assert ("the first is kept" in caplog.text) == (default == ONE_BUCKET)
