"""Parts of JPEG files have the pixels of whole images, and damaged files do no harm."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmn.readers import photo_parts
from torchmn.readers.decoding import decode
from torchmn.readers.photo_parts import read_part
from torchmn.readers.transforms import Region

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytest.importorskip("numba", reason="numba is not installed")
compiled = pytest.importorskip("torchmn.readers.jpeg_compiled", reason="numba is not installed")

Pixels = np.ndarray[Any, Any]


def picture(rows: int, columns: int, seed: int = 0, noise: float = 0.1) -> Pixels:
    """Waves of all colours, and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:rows, :columns]
    waves = [np.sin(x / random.uniform(2, 30) + y / random.uniform(2, 30)) for _ in range(3)]
    values = (1 - noise) * np.stack(waves, -1) + noise * random.uniform(-1, 1, (rows, columns, 3))
    return (127.5 + 127.5 * values).round().astype(np.uint8)


def encoded(pixels: Pixels, **options: Any) -> bytes:
    content = io.BytesIO()
    PIL.fromarray(pixels).save(content, "JPEG", **{"quality": 90, **options})
    return content.getvalue()


def colors_of(content: bytes, top: int, left: int, height: int, width: int) -> Pixels | None:
    """What the compiled decoder gives for a part: blue, green, red; None: nothing."""
    found = compiled.decode(np.frombuffer(content, np.uint8), top, left, height, width)
    fields = [(found >> np.uint64(shift)) & np.uint64(0x1FFFFF) for shift in (0, 21, 42)]
    return np.stack(fields, -1)[:, :width] if found.size else None


KINDS = [("RGB", 0), ("RGB", 1), ("RGB", 2), ("L", 0)]  # 4:4:4, 4:2:2, 4:2:0 and grey


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_are_equal_to_those_of_the_whole_image(data: st.DataObject) -> None:
    draw = data.draw
    rows, columns = (draw(st.integers(16, 90), label=name) for name in ("rows", "columns"))
    top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    height, width = draw(st.integers(1, rows - top)), draw(st.integers(1, columns - left))
    mode, subsampling = draw(st.sampled_from(KINDS))
    pixels = picture(rows, columns, draw(st.integers(0, 9)), draw(st.sampled_from([0.0, 0.1, 1.0])))
    options: dict[str, Any] = {"quality": draw(st.sampled_from([10, 50, 75, 95, 100]))}
    options["optimize"] = draw(st.booleans())
    if mode == "L":
        pixels = pixels[:, :, 0]
    else:
        options["subsampling"] = subsampling
    content = encoded(pixels, **options)
    expected = decode(content, 3)[top : top + height, left : left + width]
    np.testing.assert_array_equal(colors_of(content, top, left, height, width), expected)


def test_real_photos_are_equal(real_data: Path) -> None:
    random = np.random.default_rng(0)
    with tarfile.open(real_data / "flower-photos-160" / "flower_photos_160.tar") as tar:
        members = [member for member in tar if member.name.endswith(".jpg")]
        for member in members[:: len(members) // 60]:
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            whole = decode(content, 3)
            rows, columns = whole.shape[:2]
            top, left = int(random.integers(rows)), int(random.integers(columns))
            height, width = (
                int(random.integers(size)) + 1 for size in (rows - top, columns - left)
            )
            expected = whole[top : top + height, left : left + width]
            np.testing.assert_array_equal(colors_of(content, top, left, height, width), expected)


@pytest.mark.parametrize("is_mirrored", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (33, 31), (200, 200), (17, 120), (120, 17)])
def test_weights_are_those_of_antialias(size: tuple[int, int], is_mirrored: bool) -> None:
    """Of several kinds, larger and smaller; PyTorch rounds the width first, we the fewer rows."""
    for seed, (height, width) in enumerate([(50, 60), (90, 33), (16, 16), (1, 1), (100, 120)]):
        content = encoded(picture(100, 120, seed, noise=0.3))
        region = Region(100 - height, 120 - width, height, width, is_mirrored)
        found = np.full((*size, 3), 77, np.uint8)
        assert read_part(content, region, found)
        part = np.ascontiguousarray(decode(content, 3)[region.top :, region.left :])
        planes = torch.from_numpy(part).permute(2, 0, 1).unsqueeze(0)
        expected = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True)
        pixels = expected[0].permute(1, 2, 0).numpy()
        pixels = pixels[:, ::-1] if is_mirrored else pixels
        difference = np.abs(found.astype(int) - pixels)
        assert difference.max() <= 2
        assert difference.mean() < 0.25


def damaged_segment(content: bytes) -> bytes:
    at = content.index(b"\xff\xc4")
    return content[: at + 5] + b"\xff" * 16 + content[at + 21 :]


def with_fraction_of_codes(content: bytes) -> bytes:
    begin = content.index(b"\xff\xda") + 14
    return content[: begin + 40] + b"\xff\xd9"


def turned() -> bytes:
    exif = PIL.Exif()
    exif[0x0112] = 6
    return encoded(picture(40, 40), exif=exif)


def of_four_colors() -> bytes:
    content = io.BytesIO()
    PIL.fromarray(picture(40, 40)).convert("CMYK").save(content, "JPEG")
    return content.getvalue()


def half_as_high() -> bytes:
    """With half as many rows of colour as of light, and all columns."""
    simplejpeg = pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    encoded: bytes = simplejpeg.encode_jpeg(picture(40, 40), colorsubsampling="440")
    return encoded


BASELINE = encoded(picture(40, 40))
OTHERS: dict[str, Callable[[], bytes]] = {
    "progressive": lambda: encoded(picture(40, 40), progressive=True),
    "with restarts": lambda: encoded(picture(40, 40), restart_marker_blocks=2),
    "of four colours": of_four_colors,
    "of red, green and blue": lambda: encoded(picture(40, 40), keep_rgb=True),
    "of another sampling": half_as_high,
    "very small": lambda: encoded(picture(8, 40)),
    "turned": turned,
    "no JPEG": lambda: b"\x89PNG" + BASELINE[4:],
    "empty": lambda: b"",
    "only the beginning": lambda: BASELINE[:3],
    "without an end": lambda: BASELINE[:-2],
    "ended within the codes": lambda: with_fraction_of_codes(BASELINE),
    "with a wrong table": lambda: damaged_segment(BASELINE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_is_left_to_other_decoders(name: str) -> None:
    into = np.full((8, 8, 3), 77, np.uint8)
    assert read_part(BASELINE, Region(0, 0, 8, 8, False), into)
    into[:] = 77
    assert not read_part(OTHERS[name](), Region(0, 0, 8, 8, False), into)
    assert (into == 77).all()


@pytest.mark.parametrize("region", [(-1, 0, 8, 8), (0, -1, 8, 8), (33, 0, 8, 8), (0, 33, 8, 8)])
def test_a_part_outside_of_the_image_is_not_read(region: tuple[int, int, int, int]) -> None:
    assert colors_of(BASELINE, *region) is None


def test_without_numba_a_warning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photo_parts.importlib.util, "find_spec", lambda name: None)
    photo_parts.kernels.cache_clear()
    try:
        into = np.empty((8, 8, 3), np.uint8)
        with pytest.warns(UserWarning, match="decoded whole.*pip install 'torchmn"):
            assert not read_part(BASELINE, Region(0, 0, 8, 8, False), into)
    finally:
        photo_parts.kernels.cache_clear()


def damage(content: bytes, seed: int) -> bytes:
    """Some bytes of a file replaced, or a part of it left out."""
    random = np.random.default_rng(seed)
    changed = bytearray(content)
    if seed % 4 == 0:
        begin = int(random.integers(len(changed)))
        del changed[begin : begin + int(random.integers(1, 50))]
    for place in random.integers(0, len(changed), random.integers(1, 6)):
        changed[place] = random.choice([0, 1, 0x7F, 0xC4, 0xFF, random.integers(256)])
    return bytes(changed)


def decode_damaged(num: int) -> None:
    contents = [
        encoded(picture(40, 56), subsampling=subsampling, optimize=optimize)
        for subsampling in (0, 1, 2)
        for optimize in (False, True)
    ]
    num_decoded = 0
    for seed in range(num):
        content = damage(contents[seed % len(contents)], seed)
        num_decoded += colors_of(content, seed % 20, seed % 23, 16, 24) is not None
    assert 0.1 * num < num_decoded < 0.9 * num  # neither all nor none was refused at once


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_files_are_read_within_bounds(tmp_path: Path) -> None:
    """Compiled with checks of each index, in a process of its own."""
    root = Path(__file__).parents[3]
    variables = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.unit.readers.test_photo_parts import decode_damaged as run; run(3000)",
        ],
        env={**os.environ, **variables, "PYTHONPATH": f"{root}:{root / 'src'}"},
        cwd=root,
        check=True,
    )
