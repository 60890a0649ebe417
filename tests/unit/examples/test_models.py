"""The networks of the examples have the shapes and sizes that the records are about."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """Makes a network of ``examples/models`` by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    models = importlib.import_module("models")
    yield lambda name, **options: getattr(models, name)(**options)
    for module in [name for name in sys.modules if name.split(".")[0] == "models"]:
        del sys.modules[module]


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "options", "shape", "expected"),
    [
        ("VGG", {}, (3, 32, 32), 14_987_200),
        ("VGG", {"num_classes": 5, "in_channels": 1}, (1, 32, 32), 14_983_488),
        ("ResNet", {}, (3, 32, 32), 269_722),
        ("ResNet", {"num_blocks": 1, "num_classes": 5}, (3, 32, 32), 74_965),
        ("ImageNetResNet", {"num_classes": 1000}, (3, 64, 64), 25_557_032),
        ("ImageNetResNet", {"num_classes": 1000, "arch": "resnet18"}, (3, 64, 64), 11_689_512),
        ("SmallCNN", {}, (1, 28, 28), 426_234),
        ("SmallCNN", {"image_size": 8}, (1, 8, 8), 57_594),
        ("SmallCNN", {"in_channels": 3, "image_size": 32}, (3, 32, 32), 549_402),
        ("MLP", {}, (1, 28, 28), 1_796_010),
        ("MLP", {"num_inputs": 64, "num_units": 10}, (1, 8, 8), 870),
    ],
)
def test_shapes_and_sizes(
    model: Callable[..., nn.Module],
    name: str,
    options: dict[str, int],
    shape: tuple[int, ...],
    expected: int,
) -> None:
    network = model(name, **options)
    logits = network(torch.rand(2, *shape))
    assert logits.shape == (2, options.get("num_classes", 10))
    assert num_parameters(network) == expected
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_vgg_has_the_layers_of_chainer_s(model: Callable[..., nn.Module]) -> None:
    network = model("VGG")
    kinds = [type(layer) for layer in network.modules()]
    assert kinds.count(nn.Conv2d) == 13
    assert kinds.count(nn.BatchNorm2d) == 13
    assert kinds.count(nn.MaxPool2d) == 5
    dropouts = [layer.p for layer in network.modules() if isinstance(layer, nn.Dropout)]
    assert dropouts == [0.3, *[0.4] * 7, 0.5, 0.5]
    convolution = network.features[3 + 1]
    assert convolution.weight.std().item() == pytest.approx((64 * 9) ** -0.5, rel=0.05)


def test_vgg_refuses_images_of_another_size(model: Callable[..., nn.Module]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model("VGG")(torch.rand(2, 3, 64, 64))
