"""Options by Hydra, on many workers.

    torchmn run -n 2 examples/tools/train_hydra.py learning_rate=0.1

Hydra gives each run a folder of its own by the time of day, which may differ between ranks: that of
rank 0 is broadcast.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader

import torchmn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets import load_images
from models import MLP


@dataclass
class Options:
    """Options of the training."""

    learning_rate: float = 0.05
    epochs: int = 3
    codec: str = "float32"


ConfigStore.instance().store(name="options", node=Options)


@hydra.main(version_base=None, config_name="options")
def main(options: Options) -> None:
    """What each rank runs."""
    comm = torchmn.create_communicator()
    folder = Path(comm.bcast_obj(HydraConfig.get().runtime.output_dir))
    torch.manual_seed(0)
    images = load_images("digits", None).normalised()
    model = MLP(num_inputs=64, num_units=100).to(comm.device)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9),
        comm,
        model,
        codec=options.codec,
        weight="samples",
    )
    train = DataLoader(images.train, batch_sampler=torchmn.GlobalSampler(images.train, comm, 64))
    for _ in range(options.epochs):
        for inputs, labels in train:
            optimizer.zero_grad()
            inputs, labels = inputs.to(comm.device), labels.to(comm.device)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if comm.rank == 0:
        inputs, labels = (tensor.to(comm.device) for tensor in images.test.tensors)
        with torch.no_grad():
            right = (model(inputs).argmax(1) == labels).float().mean()
        torch.save(model.state_dict(), folder / "model.pt")
        print(f"accuracy {float(right):.4f} in {folder}")


if __name__ == "__main__":
    main()
