"""Residuals: by name, through other layouts, discarded, resharded."""

from __future__ import annotations

import pytest
import torch

from torchmn.comm.codecs import Layout
from torchmn.comm.codecs.layout import Segment
from torchmn.comm.codecs.residuals import Residuals, reshard
from torchmn.errors import UsageError

CPU = torch.device("cpu")


def stripe(*runs: tuple[str, int, int]) -> Layout:
    """Segments of (name, offset in the parameter, numel), with gaps between them."""
    segments, start = [], 4
    for name, offset, numel in runs:
        segments.append(Segment(name, start, numel, offset))
        start += numel + 3
    return Layout(tuple(segments))


def fill(residuals: Residuals, side: str, layout: Layout, first: float) -> None:
    """Make the residual of element i of every parameter ``first`` + i, and valid."""
    block = residuals.block(side, layout, CPU)
    for position, segment in enumerate(layout.segments):
        at = segment.start - layout.begin
        values = first + segment.offset + torch.arange(segment.numel)
        block.pending[at : at + segment.numel] = values
        assert block.part(position).numel() == segment.numel
    block.is_written = True


def test_what_is_written_is_valid_from_the_end_of_the_exchange() -> None:
    residuals, layout = Residuals(), stripe(("a", 0, 5))
    fill(residuals, "worker", layout, 10)
    assert not residuals.block("worker", layout, CPU).current.any()
    residuals.finish(is_valid=False)
    assert not residuals.block("worker", layout, CPU).current.any()
    fill(residuals, "worker", layout, 10)
    residuals.finish(is_valid=True)
    assert residuals.block("worker", layout, CPU).current.tolist() == [10, 11, 12, 13, 14]
    residuals.finish(is_valid=True)  # nothing was written since
    assert residuals.block("worker", layout, CPU).current.tolist() == [10, 11, 12, 13, 14]


def test_a_worker_takes_what_it_lost_as_an_earlier_owner() -> None:
    residuals = Residuals()
    fill(residuals, "owner", stripe(("a", 0, 20)), 100)
    fill(residuals, "worker", stripe(("a", 20, 10)), 0)
    residuals.finish(is_valid=True)
    # now rank 1 owns 0 to 10, and this rank the rest
    worker = residuals.block("worker", stripe(("a", 0, 10)), CPU, is_owner=False)
    flushed = residuals.block("worker", stripe(("a", 10, 20)), CPU)
    owner = residuals.block("owner", stripe(("a", 10, 20)), CPU)
    assert worker.current.tolist() == [100.0 + i for i in range(10)]
    assert flushed.current.tolist() == [0.0] * 10 + [float(i) for i in range(20, 30)]
    assert owner.current.tolist() == [100.0 + i for i in range(10, 20)] + [0.0] * 10


def test_equal_layouts_share_residuals_and_others_do_not() -> None:
    residuals = Residuals()
    one, other = stripe(("a", 0, 5)), stripe(("b", 0, 5))
    fill(residuals, "worker", one, 1)
    fill(residuals, "owner", one, 7)
    residuals.finish(is_valid=True)
    assert residuals.block("worker", stripe(("a", 0, 5)), CPU).current.tolist() == [1, 2, 3, 4, 5]
    assert residuals.block("owner", stripe(("a", 0, 5)), CPU).current.tolist() == [7, 8, 9, 10, 11]
    assert not residuals.block("worker", other, CPU).current.any()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_residuals_of_a_frozen_parameter_are_kept(is_loaded: bool) -> None:
    residuals = Residuals()
    fill(residuals, "worker", stripe(("a", 0, 5), ("frozen", 0, 4)), 1)
    residuals.finish(is_valid=True)
    if is_loaded:
        state = residuals.state_dict()
        residuals = Residuals()
        residuals.load_state_dict(state)
    for is_valid in (False, True, True):
        fill(residuals, "worker", stripe(("a", 0, 5)), 1)
        residuals.finish(is_valid=is_valid)
    assert [e["name"] for e in residuals.state_dict()] == ["a", "frozen"]
    block = residuals.block("worker", stripe(("frozen", 0, 4), ("a", 0, 5)), CPU)
    assert block.part(0).tolist() == [1, 2, 3, 4]


def test_one_element_in_two_stripes_of_one_exchange_is_rejected() -> None:
    residuals = Residuals()
    fill(residuals, "worker", stripe(("a", 0, 5)), 1)
    with pytest.raises(UsageError, match="encoded twice in one exchange"):
        residuals.block("worker", stripe(("a", 3, 5)), CPU)


def entry(side: str, name: str, offset: int, values: list[float]) -> dict:
    return {"side": side, "name": name, "offset": offset, "values": torch.tensor(values)}


def test_a_piece_of_another_scale_is_converted_when_it_is_taken() -> None:
    residuals, layout = Residuals(), stripe(("a", 0, 4))
    residuals.scale = 0.5
    fill(residuals, "worker", layout, 10)
    residuals.finish(is_valid=True)
    state = residuals.state_dict()
    assert [entry["scale"] for entry in state] == [0.5]
    loaded = Residuals()
    loaded.load_state_dict(state)
    for each in (residuals, loaded):
        each.scale = 2.0
        assert each.block("worker", layout, CPU).current.tolist() == [40, 44, 48, 52]
        each.finish(is_valid=True)
        each.scale = 1.0
        halves = [each.block("worker", stripe(("a", at, 2)), CPU) for at in (0, 2)]
        assert [half.current.tolist() for half in halves] == [[20, 22], [24, 26]]


def test_reshard_counts_in_means() -> None:
    """Of ranks that were saved after sums of different multiples of their means."""
    states = [
        {"residuals": [{**entry("worker", "a", 0, [4.0]), "scale": 2.0}]},
        {"residuals": [{**entry("owner", "a", 0, [3.0]), "scale": 0.5}]},
        {"residuals": [entry("worker", "a", 0, [1.0])]},  # saved before residuals had a scale
    ]
    (only,) = reshard(states, 3)["residuals"]
    assert only["values"].tolist() == [3.0]
    assert only["scale"] == 1.0


def test_reshard_needs_states_and_workers() -> None:
    with pytest.raises(UsageError, match="got 0 states"):
        reshard([], 2)
    with pytest.raises(UsageError, match="num_workers=0"):
        reshard([{"residuals": []}], 0)
