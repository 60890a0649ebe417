"""Reading a description, and what it refuses to answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.planning.descriptions import TEXT
from torchmn.errors import UsageError
from torchmn.planning.description import PAYLOAD_SHARE, Description, read_description


@pytest.fixture
def known(tmp_path: Path) -> Description:
    path = tmp_path / "training.toml"
    path.write_text(TEXT)
    return read_description(path)


def test_json_and_toml_are_the_same(known: Description, tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "training.json"
    path.write_text(json.dumps(msgspec.to_builtins(known)))
    assert read_description(path) == known


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("samples = 32", 'samples = "many"'), "Expected `int`, got `str`"),
        (("compute_s = 0.100", "compute_ms = 100"), "unknown field `compute_ms`"),
        (("compute_s = 0.100", "compute_s = 0"), "must be above 0"),
        (("parameters = 5_000_000", ""), "give either parameters"),
        (('rate = "1gbit"', ""), "needs a rate"),
        (("backward_share = 0.6", "backward_share = 1.5"), "at most 1"),
        (("[link]", "[link"), "Expected ']'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    path = tmp_path / "training.toml"
    path.write_text(TEXT.replace(*change, 1))
    with pytest.raises(UsageError, match="does not describe a training") as raised:
        read_description(path)
    assert reason in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read: it does not exist\. Name"):
        read_description(tmp_path / "none.toml")


def test_batch_sizes_between_measured_ones(known: Description) -> None:
    assert known.compute_of(None).samples == 32
    assert known.compute_of(48).compute_s == pytest.approx(0.140)
    assert known.compute_of(96).compute_s == pytest.approx(0.260)
    assert known.compute_of(96).error_s > known.compute_of(64).error_s
    for samples in (16, 129):
        with pytest.raises(UsageError, match="measured were 32, 64"):
            known.compute_of(samples)


def test_one_batch_size_says_nothing_of_others(known: Description) -> None:
    import msgspec

    one = msgspec.structs.replace(known, batches=known.batches[:1])
    assert one.compute_of(32).compute_s == 0.1
    with pytest.raises(UsageError, match="Record short runs with two batch sizes"):
        one.compute_of(64)


def test_links(known: Description) -> None:
    link = known.link_of("10gbit")
    assert link is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(1.25e9 * PAYLOAD_SHARE)
    assert (link.latency_s, link.message_s) == (1e-4, 1e-5)
    with pytest.raises(UsageError, match="'fast' is not a rate"):
        known.link_of("fast")


def test_a_codec_that_was_not_timed(known: Description) -> None:
    assert known.codec_of("int8").bits == 8.1
    with pytest.raises(UsageError, match="1bit was not timed.*float32, int8"):
        known.codec_of("1bit")


def test_gradients_as_recorded(known: Description) -> None:
    import msgspec

    from torchmn.planning.description import Gradients

    columns = Gradients(
        ready_s=[0.5, 0.2], numel=[10, 1000], nbytes=[40, 4000], is_small=[True, False]
    )
    step = msgspec.structs.replace(known, parameters=None, gradients=columns).step_of(None)
    assert [gradient.numel for gradient in step.gradients] == [1000, 10]
    assert step.gradients[-1].ready_s == pytest.approx(0.06)  # scaled to 60 % of the step
