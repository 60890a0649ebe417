"""Train with Accelerate, as its documentation shows."""

import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

SIZE = int(os.environ.get("WORLD_SIZE", "1"))

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == SIZE
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(48, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8 // SIZE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    trained = accelerator.unwrap_model(model)
    torch.save([p.detach().clone() for p in trained.parameters()], sys.argv[1])
accelerator.end_training()
