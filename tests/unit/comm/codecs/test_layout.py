"""Layouts: what is small, and where buckets are cut."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchmn.comm.codecs import Layout
from torchmn.comm.codecs.layout import Segment, is_small


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((512,), True),
        ((65_536,), True),
        ((65_537,), False),  # a flattened model is one vector, and must not travel as it is
        ((10, 100), True),
        ((32, 32), False),
        ((64, 3, 3, 3), False),
        ((), True),
    ],
)
def test_what_is_small(shape: tuple[int, ...], expected: bool) -> None:
    assert is_small(shape) is expected


def test_of_parameters() -> None:
    layout = Layout.of(
        [("b", 2112, (64,)), ("a", 0, (3, 701)), ("none", 2110, (0, 5))], torch.float16
    )
    assert layout.segments == (
        Segment("a", 0, 2103, shape=(3, 701)),
        Segment("b", 2112, 64, is_small=True, shape=(64,)),
    )
    assert all(segment.is_whole for segment in layout.segments)
    assert not any(segment.is_whole for segment in layout.between(1, 2150).segments)
    assert (layout.begin, layout.end, layout.span, layout.numel) == (0, 2176, 2176, 2167)
    assert layout.wide_dtype == torch.float32
    again = Layout.of([("a", 0, (3, 701)), ("b", 2112, (64,))], torch.float16)
    assert layout == again
    assert hash(layout) == hash(again)
    assert layout != layout.moved(0, torch.float32)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(1, 5000), max_size=12))
    segments, start = [], draw(st.integers(0, 9))
    for index, size in enumerate(sizes):
        offset = 64 * draw(st.integers(0, 3))
        segments.append(Segment(f"p{index}", start, size, offset, draw(st.booleans())))
        start += size + draw(st.integers(0, 20))
    return Layout(tuple(segments))


FEWER_ELEMENTS_THAN_STRIPES = Layout((Segment("p0", 0, 1), Segment("p1", 1, 1, is_small=True)))


@example(FEWER_ELEMENTS_THAN_STRIPES, 3, 4.0)
@given(layouts(), st.integers(1, 6), st.sampled_from([1.0, 4.0, 32.0]))
def test_stripes_cover_once_in_order_and_keep_blocks(
    layout: Layout, num_stripes: int, small_cost: float
) -> None:
    stripes = layout.split(num_stripes, 64, small_cost=small_cost)
    assert len(stripes) == num_stripes
    met = [
        (s.name, s.offset + i, s.start + i)
        for stripe in stripes
        for s in stripe.segments
        for i in range(s.numel)
    ]
    expected = [
        (s.name, s.offset + i, s.start + i) for s in layout.segments for i in range(s.numel)
    ]
    assert met == expected
    wholes = {s.name: s for s in layout.segments}
    for stripe in stripes:
        for s in stripe.segments:
            whole = wholes[s.name]
            if s.is_small:
                assert s == whole
            else:
                assert s.offset == whole.offset or s.offset % 64 == 0


@given(st.integers(1, 6), st.integers(1, 40))
def test_stripes_cost_about_the_same(num_stripes: int, num_parameters: int) -> None:
    entries = [
        (f"p{i}", i * 20_000, (10, 1999) if i % 2 else (900,)) for i in range(num_parameters)
    ]
    layout = Layout.of(entries, torch.float32)
    costs = [
        sum(s.numel * (32 if s.is_small else 1) for s in stripe.segments)
        for stripe in layout.split(num_stripes, 512, small_cost=32)
    ]
    # every cut is at most half a block or half a small parameter off its place
    assert max(costs) - min(costs) <= 2 * 900 * 32


@given(layouts(), st.integers(0, 9000), st.integers(0, 9000))
def test_between(layout: Layout, start: int, stop: int) -> None:
    part = layout.between(start, stop)
    met = [s.start + i for s in part.segments for i in range(s.numel)]
    assert met == [i for s in layout.segments for i in range(s.start, s.end) if start <= i < stop]
    for s in part.segments:
        whole = next(w for w in layout.segments if w.name == s.name)
        assert s.offset - whole.offset == s.start - whole.start
