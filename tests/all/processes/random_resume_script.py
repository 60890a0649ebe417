"""Resumes from before and after the beginning of training, and draws the same numbers again."""

import random
import sys

import numpy as np
import torch
from torch import nn

import torchmn

comm = torchmn.create_communicator(quiet=True)


def train(folder, seed, *, resumed=""):
    """The numbers and losses from a step on; saves before the first one and after the second."""
    streams = torchmn.seed_ranks(seed, comm)
    order = torch.randperm(8).tolist()
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, net)
    state = {"net": net, "optimizer": optimizer}
    first = 0
    if resumed:
        checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, resumed)
        first = checkpointer.resume(state)
        checkpointer.close()
        assert streams.is_shared == (resumed == "before")
    seen = [] if resumed else [order]
    for number in range(first, 4):
        if not resumed and number in (0, 2):
            name = "after" if number else "before"
            checkpointer = torchmn.create_multi_node_checkpointer(comm, folder, name)
            checkpointer.save(number, state)
            checkpointer.close()
        x = torch.rand(4, 4)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        seen.append([loss.item(), random.random(), float(np.random.rand()), float(torch.rand(1))])
    optimizer.close()
    return seen


whole = train(sys.argv[1], 0)
everyone = comm.allgather_obj(whole)
assert everyone[0][0] == everyone[1][0]  # the order, before training
for number in range(1, 5):
    assert all(a != b for a, b in zip(everyone[0][number], everyone[1][number], strict=True))
assert train(sys.argv[1], 5, resumed="after") == whole[3:]
assert train(sys.argv[1], 6, resumed="before") == whole[1:]
print("resumed")
comm.finalize()
