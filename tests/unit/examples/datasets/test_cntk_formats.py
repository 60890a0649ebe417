"""The archives as CNTK's map files and text: what is read from them is what is in the archives."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from examples import datasets

import torchmn.cntk as C
from tests.unit.examples.datasets.makers import RawImages, cifar_parts, grey_part

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture
def make_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    monkeypatch.syspath_prepend(EXAMPLES / "cntk")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    module = importlib.import_module("make_data")
    yield module
    del sys.modules["make_data"]


def make(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, out: Path, address: str
) -> None:
    arguments = [name, "--out", str(out), "--data-root", str(out / "archives"), "--download"]
    monkeypatch.setattr(sys, "argv", ["make_data.py", *arguments, "--mirror", address])
    module.main()


def read(source: C.MinibatchSource) -> tuple[np.ndarray, np.ndarray]:
    streams = {"features": source.streams.features, "labels": source.streams.labels}
    found = source.next_minibatch(1000, streams)
    labels = found["labels"].data
    labels = labels.to_dense() if labels.layout == torch.sparse_csr else labels
    return found["features"].data.numpy(), labels.argmax(1).numpy()


def test_cifar10(
    make_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mirror: tuple[str, list[str]],
) -> None:
    make(make_data, monkeypatch, "cifar10", tmp_path, mirror[0])
    assert mirror[1] == ["/cifar-10-binary.tar.gz"]
    train, test = cifar_parts()
    mean = train.images.mean(axis=0)[::-1]
    parts: list[tuple[str, RawImages]] = [("train", train), ("test", test)]
    for part, expected in parts:
        for transforms, shift in (
            ([], 0),
            ([C.io.transforms.mean(tmp_path / "CIFAR-10_mean.xml")], mean),
        ):
            streams = C.io.StreamDefs(
                features=C.io.StreamDef(field="image", transforms=transforms),
                labels=C.io.StreamDef(field="label", shape=10),
            )
            deserializer = C.io.ImageDeserializer(tmp_path / f"{part}_map.txt", streams)
            images, labels = read(C.io.MinibatchSource(deserializer, max_sweeps=1, randomize=False))
            assert (labels == expected.labels).all()
            wanted = expected.images[:, ::-1] - shift  # blue, green, red
            np.testing.assert_allclose(images, wanted, atol=1e-4)


def test_mnist(
    make_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mirror: tuple[str, list[str]],
) -> None:
    make(make_data, monkeypatch, "mnist", tmp_path, mirror[0])
    for part, prefix in (("Train", "train"), ("Test", "t10k")):
        streams = C.io.StreamDefs(
            features=C.io.StreamDef(shape=784), labels=C.io.StreamDef(shape=10)
        )
        path = tmp_path / f"{part}-28x28_cntk_text.txt"
        deserializer = C.io.CTFDeserializer(path, streams)
        images, labels = read(C.io.MinibatchSource(deserializer, max_sweeps=1, randomize=False))
        expected = grey_part(prefix)
        assert (labels == expected.labels).all()
        assert (images == expected.images.reshape(-1, 784)).all()
