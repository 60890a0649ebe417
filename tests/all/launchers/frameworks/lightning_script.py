"""Train with Lightning's Trainer, as its documentation shows."""

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


lightning.seed_everything(0)
model = Model()
inputs = torch.randn(48, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8 // SIZE)
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=SIZE,
    strategy=DDPStrategy(process_group_backend="gloo") if SIZE > 1 else "auto",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)
assert trainer.world_size == SIZE
if trainer.global_rank == 0:
    torch.save([p.detach().clone() for p in model.parameters()], sys.argv[1])
