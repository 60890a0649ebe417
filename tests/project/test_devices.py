"""Tensors of our own are created with a device: `torch.set_default_device` is the user's."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "torchmn"
HAVE_A_DEVICE = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("tensor", "zeros", "Generator"),
}


def without_device(source: str) -> Iterator[int]:
    """Lines in which torch makes a tensor wherever the default device is."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in HAVE_A_DEVICE
            and not any(keyword.arg == "device" for keyword in node.keywords)
        ):
            yield node.lineno


@pytest.mark.parametrize("folder", sorted({p.parent for p in SOURCE.rglob("*.py")}))
def test_no_tensor_goes_to_the_default_device(folder: Path) -> None:
    if "testing" in folder.parts:
        return  # contracts make what users would make
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(folder.glob("*.py"))
        for line in without_device(path.read_text())
    ]
    assert not found, 'give device="cpu", or the device that is meant'


def test_one_without_is_found() -> None:
    assert list(without_device("x = torch.zeros(3)\ny = torch.zeros(3, device=d)")) == [1]
