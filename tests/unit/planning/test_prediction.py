"""Error bars, refusals, and what would pay."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.unit.planning.descriptions import TEXT
from torchmn.errors import TorchmnError, UsageError
from torchmn.planning.calibration import Observation, calibrated
from torchmn.planning.description import Costs, Description, Link, Setting, read_description
from torchmn.planning.prediction import predict_setting
from torchmn.planning.what_pays import what_pays


@pytest.fixture
def known(tmp_path: Path) -> Description:
    path = tmp_path / "training.toml"
    path.write_text(TEXT)
    return read_description(path)


def test_the_bar_holds_the_prediction_and_grows_with_what_is_unknown(known: Description) -> None:
    base = predict_setting(known, known.setting)
    assert base.low_s < base.seconds < base.high_s
    assert 0 < base.efficiency < 1
    assert base.speed_up == pytest.approx(2 * base.efficiency)
    without = msgspec.structs.replace(known, costs=None)
    fast = msgspec.structs.replace(known.setting, rate="10gbit")  # where the link hides nothing
    base, unknown = predict_setting(known, fast), predict_setting(without, fast)
    assert unknown.seconds < base.seconds
    assert unknown.high_s - unknown.seconds > base.high_s - base.seconds
    assert any("was not measured" in note for note in unknown.notes)


def test_many_ranks_are_less_certain(known: Description) -> None:
    link = Link(rate="1gbit", latency_s=1e-4)
    vague = msgspec.structs.replace(known, link=link)
    few, many = (
        predict_setting(vague, msgspec.structs.replace(known.setting, hosts=hosts))
        for hosts in (2, 1000)
    )
    assert (many.high_s - many.low_s) / many.seconds > 2 * (few.high_s - few.low_s) / few.seconds
    assert many.efficiency < few.efficiency
    assert any("rarer delays" in note for note in many.notes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"codec": "1bit"}, "was not timed"),
        ({"samples": 1000}, "No step with 1000 samples"),
        ({"schedule": "parameter_server"}, "parameter_server"),
        ({"route": "straight"}, "straight"),
        ({"hosts": 0}, "hosts=0 must be 1 or more"),
        ({"cores_per_rank": 0.0}, "must be above 0"),
        ({"overlap_steps": 16}, "less than block_steps=16"),
        ({"rate": "quick"}, "not a rate"),
    ],
)
def test_without_data_there_is_no_answer(
    known: Description, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(TorchmnError, match=reason):
        predict_setting(known, msgspec.structs.replace(known.setting, **change))


def test_hosts_need_a_link(known: Description) -> None:
    without = msgspec.structs.replace(known, link=None)
    assert predict_setting(without, Setting()).efficiency == 1.0
    with pytest.raises(UsageError, match="no link is known"):
        predict_setting(without, Setting(hosts=2))
    with pytest.raises(UsageError, match="latency_s"):
        predict_setting(without, Setting(hosts=2, rate="1gbit"))


def test_calibration_finds_the_costs_that_made_the_steps(known: Description) -> None:
    true = Costs(send_s_per_byte=3e-9, pack_s_per_byte=1e-9)
    truth = msgspec.structs.replace(known, costs=true)
    settings = [Setting(hosts=2, rate="10gbit"), Setting(hosts=2, rate="10gbit", codec="int8")]
    observations = [
        Observation(setting=setting, step_s=predict_setting(truth, setting).seconds)
        for setting in settings
    ]
    found = calibrated(msgspec.structs.replace(known, costs=None), observations).costs
    assert found is not None
    assert found.send_s_per_byte == pytest.approx(3e-9, rel=0.05)
    assert found.pack_s_per_byte == pytest.approx(1e-9, rel=0.1)
    assert found.interference == 0.0


def test_a_step_that_only_the_link_limits_says_nothing_of_costs(known: Description) -> None:
    setting = Setting(hosts=2, rate="10mbit", schedule="double_buffering")
    without = msgspec.structs.replace(known, costs=None)
    seconds = predict_setting(without, setting).seconds
    found = calibrated(without, [Observation(setting=setting, step_s=seconds)]).costs
    assert found == Costs()


def test_a_slow_link_pays_most_and_a_single_batch_size_is_refused(known: Description) -> None:
    slow = msgspec.structs.replace(known.setting, rate="100mbit")
    changes, refused = what_pays(known, slow)
    assert changes == sorted(changes, key=lambda change: -change.gain)
    by_text = {change.text: change for change in changes}
    assert by_text["links of 1gbit"].gain > 2
    assert by_text["codec int8"].gain > 2
    assert by_text["1 host"].prediction.efficiency == 1.0
    assert refused == []
    one = msgspec.structs.replace(known, batches=known.batches[:1])
    _, refused = what_pays(one, slow)
    assert len(refused) == 1
    assert refused[0].startswith("batches of 64 samples: ")
