"""The table of a training, what it refuses, and the source documents' rows."""

from pathlib import Path

import msgspec
import pytest

from tests.unit.observe.plan.tables import TEXT
from torchmn.errors import TorchmnError, UsageError
from torchmn.exchange.auto.predict import ReadyGradient
from torchmn.observe.plan.facts import PAYLOAD_SHARE, Training, predict, read_table

EXAMPLE = Path(__file__).parents[4] / "examples" / "imagenet" / "240_gpus.toml"


@pytest.fixture
def known(tmp_path: Path) -> Training:
    path = tmp_path / "training.toml"
    path.write_text(TEXT)
    return read_table(path)


def seconds(known: Training, **changes: object) -> float:
    return predict(msgspec.structs.replace(known, **changes)).seconds


def speed_up(known: Training, **changes: object) -> float:
    changed = msgspec.structs.replace(known, **changes)
    return changed.num_ranks * known.compute_s / predict(changed).seconds


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("samples = 32", 'samples = "many"'), "Expected `int`, got `str`"),
        (("compute_s = 0.100", "compute_ms = 100"), "unknown field `compute_ms`"),
        (("compute_s = 0.100", "compute_s = 0"), "must be above 0"),
        (("backward_share = 0.6", "backward_share = 1.5"), "at most 1"),
        (("hosts = 2", "hosts = 0"), "hosts must be at least 1, got 0"),
        (("hosts = 2", "hosts = "), "Invalid value"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    path = tmp_path / "training.toml"
    path.write_text(TEXT.replace(*change, 1))
    with pytest.raises(UsageError, match="does not have the table of a training") as raised:
        read_table(path)
    assert reason in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml does not have .*No such file"):
        read_table(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schedule": "parameter_server"}, "No prediction model for .*there is one for every_step"),
        ({"schedule": "blocks"}, "No prediction model"),
        ({"codec": "2bits"}, "2bits"),
        ({"codec": "power_sgd"}, "cannot be timed by itself"),
        ({"parameters": 0}, "give parameters, their number, in the table"),
        ({"route": "straight"}, "straight"),
        ({"rate": "quick"}, "'quick' is not a positive number of bits"),
        ({"rate": None}, "2 hosts cannot be predicted: no link is known"),
        ({"latency_s": None}, "add rate and latency_s"),
    ],
)
def test_without_data_there_is_no_answer(
    known: Training, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(TorchmnError, match=reason):
        seconds(known, **change)


def test_one_host_needs_no_link(known: Training) -> None:
    assert seconds(known, hosts=1, rate=None, latency_s=None) == pytest.approx(known.compute_s)


def test_a_faster_link_and_fewer_bytes_take_less_time(known: Training) -> None:
    slow = seconds(known, rate="100mbit")
    assert slow > 3 * seconds(known, rate="1gbit") / 2 > seconds(known, rate="10gbit")
    assert seconds(known, rate="100mbit", codec="int8") < slow / 2
    assert seconds(known, rate="100mbit", schedule="block_momentum") < slow / 4
    assert seconds(known, hosts=8) > seconds(known)


def test_a_codec_that_was_not_recorded_is_timed(known: Training) -> None:
    slow = seconds(known, rate="10mbit")
    assert seconds(known, rate="10mbit", codec="1bit") < slow / 8


def test_gradients_are_scaled_to_backward(known: Training) -> None:
    """What is exchanged early is hidden, wherever the record's backward began."""
    early, late = (
        ReadyGradient(ready_s=ready_s, numel=1_250_000, nbytes=5_000_000, is_small=False)
        for ready_s in (0.1, 0.5)
    )
    changes = {"parameters": 0, "send_s_per_byte": None, "deviations": ()}
    exposed = predict(msgspec.structs.replace(known, gradients=(late, early), **changes)).exposed_s
    assert exposed == pytest.approx(5e6 / (1.25e8 * PAYLOAD_SHARE), rel=0.01)  # of the second one


# ---- what the source documents state ----

VGG = Training(  # 2 x Tesla P100 per node, VGG on 256 x 256 images; epochs of 2500 images
    samples=32,
    compute_s=0.613,
    parameters=31_500_000,
    backward_share=0.001,  # all gradients are exchanged after backward
    rate="56gbit",
    latency_s=5e-6,
    ranks_per_host=2,
    node_bytes_per_s=5.04e9,  # 126 MB in 25 ms: "between GPUs over PCIe, 25 ms"
)


@pytest.mark.parametrize(
    ("hosts", "route", "stated", "modelled"),
    [(1, "single_node", 1.86, 1.92), (2, "hierarchical", 3.54, 3.73)],
)
def test_vgg(hosts: int, route: str, stated: float, modelled: float) -> None:
    got = speed_up(VGG, hosts=hosts, route=route)
    assert got == pytest.approx(modelled, abs=0.005)
    assert got == pytest.approx(stated, rel=0.06)


@pytest.mark.parametrize(("num_gpus", "stated", "modelled"), [(128, 2.00, 1.99), (240, 3.54, 3.69)])
def test_resnet_50_on_240_gpus(num_gpus: int, stated: float, modelled: float) -> None:
    """Relative to 64 GPUs, whose step of 0.229 s was measured."""
    known = read_table(EXAMPLE)
    assert known.hosts == 120
    assert seconds(known, hosts=32) == pytest.approx(0.229, abs=0.0005)
    got = speed_up(known, hosts=num_gpus // 2) / speed_up(known, hosts=32)
    assert got == pytest.approx(modelled, abs=0.005)
    assert got == pytest.approx(stated, rel=0.05)
