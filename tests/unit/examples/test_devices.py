"""Models and batches of the examples are on the device of the communicator.

A stand-in for a GPU: tensors that were moved to the device stay on the CPU and are remembered, and
an operation on remembered and other tensors fails, as between devices. A script runs until its
first backward pass.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchmn.comm import Communicator

EXAMPLES = Path(__file__).parents[3] / "examples"
DEVICE = torch.device("meta")  # no tensor of these scripts is there
aten = torch.ops.aten
# A copy between devices, and a layer that makes its first state where its input says it is.
MAY_MIX = (aten.copy_.default, aten.mkldnn_rnn_layer.default)


class OnDevice(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # All that were ever there: none is freed, and no address comes twice.
        self._storages: dict[int, Any] = {}

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        held = [tensor for tensor in inputs if self.holds(tensor)]
        others = [tensor for tensor in inputs if tensor.dim() and not self.holds(tensor)]
        if function not in MAY_MIX and held and others:
            raise AssertionError(f"{function} of tensors on two devices")
        device = kwargs.get("device") or (DEVICE if held else None)
        if device == DEVICE and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        made = function(*args, **kwargs)
        if device == DEVICE and function is not aten.copy_.default:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    self._storages[storage._cdata] = storage
        return made


class Reached(Exception):
    pass


@pytest.mark.parametrize(
    "script",
    [
        "lm/train_lm.py --length 8 --layers 1 --width 8 --heads 2 --batchsize 2",
        "mnist/train_mnist.py --dataset digits",
        "cifar/train_cifar_multi_node.py --dataset digits --gpus 1",
        "model_parallel/train_mnist_dual.py --dataset digits --model-workers 1",
        "model_parallel/train_mnist_split.py --dataset digits",
        "model_parallel/train_mnist_parallel_convolution.py --dataset digits",
        "model_parallel/train_seq2seq.py",
        "model_parallel/train_sharded_transformer.py",
        "tools/train_tools.py",
    ],
)
def test_the_loss_is_computed_on_the_device(script, tmp_path, monkeypatch) -> None:
    path, *arguments = script.split()
    if path.startswith("tools"):
        pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    mode, losses = OnDevice(), []

    def device_of(comm: Communicator) -> torch.device:
        """The stand-in for the script, the CPU for torchmn itself."""
        caller = sys._getframe(1).f_globals["__name__"]
        return vars(comm)["device"] if caller.startswith("torchmn.") else DEVICE

    def set_device(comm: Communicator, device: torch.device) -> None:
        vars(comm)["device"] = device

    def backward(loss: Any, *args: object, **kwargs: object) -> None:
        losses.append(loss)  # or several
        raise Reached

    monkeypatch.setattr(Communicator, "device", property(device_of, set_device), raising=False)
    monkeypatch.setattr(torch.autograd, "backward", backward)
    for name in ("options", "models", "datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    monkeypatch.setattr(sys, "path", [str((EXAMPLES / path).parent), *sys.path])
    main = runpy.run_path(str(EXAMPLES / path))["main"]
    with pytest.raises(Reached), mode:
        main()
    assert all(mode.holds(loss) for loss in tree_leaves(losses))
