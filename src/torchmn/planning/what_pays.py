"""Which single change of a setting would make it faster, the best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from torchmn.errors import TorchmnError
from torchmn.planning.description import Description, Setting, rate_bytes_per_s, schedule_of
from torchmn.planning.prediction import Prediction, predict_setting

RATES = ("100mbit", "1gbit", "10gbit", "25gbit", "100gbit", "400gbit")
_SCHEDULES = ("every_step", "double_buffering", "block_momentum")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change, what it leads to, and by which factor it makes all ranks together faster."""

    text: str
    prediction: Prediction
    gain: float


def what_pays(known: Description, setting: Setting) -> tuple[list[Change], list[str]]:
    """The changes that have a prediction, the best first, and why the others have none."""
    base = predict_setting(known, setting)
    changes, refused = [], []
    for text, changed in _changes(known, setting):
        try:
            prediction = predict_setting(known, changed)
        except TorchmnError as error:
            refused.append(f"{text}: {error}")
            continue
        gain = prediction.samples_per_s / base.samples_per_s
        changes.append(Change(text=text, prediction=prediction, gain=gain))
    changes.sort(key=lambda change: -change.gain)
    return changes, refused


def _changes(known: Description, setting: Setting) -> Iterator[tuple[str, Setting]]:
    replace = msgspec.structs.replace
    if setting.hosts > 1:
        if known.link is not None:
            now = setting.rate or known.link.rate
            current = rate_bytes_per_s(now) if now else known.link.bandwidth_bytes_per_s or 0.0
            faster = next((rate for rate in RATES if rate_bytes_per_s(rate) > 1.5 * current), None)
            if faster is not None:
                yield f"links of {faster}", replace(setting, rate=faster)
        for codec in ("float32", *known.codecs):
            if codec != setting.codec:
                yield f"codec {codec}", replace(setting, codec=codec)
    if setting.num_ranks > 1:
        for schedule in _SCHEDULES:
            if schedule_of(schedule) != schedule_of(setting.schedule):
                yield f"schedule {schedule}", replace(setting, schedule=schedule)
    samples = known.compute_of(setting.samples).samples
    yield f"batches of {2 * samples} samples", replace(setting, samples=2 * samples)
    if setting.hosts > 1:
        fewer = setting.hosts // 2
        yield f"{fewer} host{'s' * (fewer > 1)}", replace(setting, hosts=fewer)
