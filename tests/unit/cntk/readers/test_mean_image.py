"""Mean images: XML of OpenCV."""

from pathlib import Path

import numpy as np
import pytest

from torchmn.cntk.readers import mean_image
from torchmn.cntk.readers.mean_image import read_mean_image, write_mean_image
from torchmn.errors import DataError, UsageError

# as CNTK's install_cifar10.py prints it, for an image of 2 x 1 pixels
OF_CNTK = """<?xml version="1.0" ?>
<opencv_storage>
  <Channel>3</Channel>
  <Row>1</Row>
  <Col>2</Col>
  <MeanImg type_id="opencv-matrix">
    <rows>1</rows>
    <cols>6</cols>
    <dt>f</dt>
    <data>1.000000e+00 2.000000e+00 3.000000e+00
      4.000000e+00 5.000000e+00 6.000000e+00</data>
  </MeanImg>
</opencv_storage>
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "mean.xml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    image = np.random.default_rng(0).random((3, 4, 5), np.float32) * 255
    path = tmp_path / "mean.xml"
    write_mean_image(path, image)
    np.testing.assert_array_equal(read_mean_image(path), image)
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_of_cntk_in_both_layouts(tmp_path: Path) -> None:
    path = write(tmp_path, OF_CNTK)
    assert read_mean_image(path).tolist() == [[[1, 4]], [[2, 5]], [[3, 6]]]
    assert read_mean_image(path, "chw-rgb").tolist() == [[[5, 6]], [[3, 4]], [[1, 2]]]


def test_channels_may_be_in_the_type(tmp_path: Path) -> None:
    text = OF_CNTK.replace("<cols>6</cols>", "<cols>2</cols>").replace("<dt>f<", "<dt>3f<")
    assert read_mean_image(write(tmp_path, text)).shape == (3, 1, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<Row>1</Row>", "", "no element Row"),
        ("<Row>1</Row>", "<Row>two</Row>", "Row is 'two'"),
        ("<Row>1</Row>", "<Row>0</Row>", "Row is '0'"),
        ("<Row>1</Row>", "<Row>" + "9" * 5000 + "</Row>", "Row is '9999"),
        ("<Row>1</Row>", "<Row>7</Row>", "1 x 6 numbers, and .* 3 x 7 x 2"),
        ("6.000000e+00", "", "6 numbers, and has 5"),
        ("6.000000e+00", "6 7", "6 numbers, and has more"),
        ("6.000000e+00", "six", "could not convert string to float: .*six"),
        ("6.000000e+00", "nan", "'nan' is no number"),
        ("6.000000e+00", "1e300", "'1e300' is no number"),
        ("</MeanImg>", "", "no XML: mismatched tag: line 13"),
        ("opencv_storage", "settings", "the element is 'settings'"),
        ("6.000000e+00", "\0", "no XML: .*line 11"),
    ],
)
def test_files_that_are_no_mean_image(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, OF_CNTK.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        read_mean_image(path)
    assert str(path) in str(caught.value)


def test_entities_are_refused(tmp_path: Path) -> None:
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    doctype = f'<!DOCTYPE x [<!ENTITY a0 "1 1 1">{entities}]>\n<opencv'
    text = OF_CNTK.replace("<opencv", doctype, 1).replace("6.000000e+00", "&a9;")
    with pytest.raises(DataError, match="a DOCTYPE"):
        read_mean_image(write(tmp_path, text))


def test_large_files_and_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, OF_CNTK)
    monkeypatch.setattr(mean_image, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="more than 100"):
        read_mean_image(path)
    with pytest.raises(DataError, match="a folder"):
        read_mean_image(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        read_mean_image(tmp_path / "absent")


@pytest.mark.parametrize(
    "image", [np.zeros((3, 4)), np.zeros((3, 0, 4)), np.full((1, 1, 1), np.nan)]
)
def test_arrays_that_are_no_mean_image(tmp_path: Path, image: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError, match="channels, height, width"):
        write_mean_image(tmp_path / "mean.xml", image)
