"""Tensors of our own are created with a device: `torch.set_default_device` is the user's."""

import ast
from collections.abc import Iterator

from .source import parsed

HAVE_A_DEVICE = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("tensor", "zeros", "Generator"),
}


def without_device(tree: ast.AST) -> Iterator[int]:
    """Lines in which torch makes a tensor wherever the default device is."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in HAVE_A_DEVICE
            and not any(keyword.arg == "device" for keyword in node.keywords)
        ):
            yield node.lineno


def test_no_tensor_goes_to_the_default_device() -> None:
    """But for contracts, which make what users would make."""
    found = [
        f"{name}:{line}"
        for name, tree in parsed().items()
        if "testing" not in name.split("/")
        for line in without_device(tree)
    ]
    assert not found, 'give device="cpu", or the device that is meant'


def test_one_without_is_found() -> None:
    tree = ast.parse("x = torch.zeros(3)\ny = torch.zeros(3, device=d)")
    assert list(without_device(tree)) == [1]
