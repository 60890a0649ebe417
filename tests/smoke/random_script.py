"""Draws numbers as scripts do, before, at and after the beginning of training; writes them down.

python random_script.py FOLDER        torchmn run -n 2 random_script.py FOLDER
"""

import copy
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

import torchmn

comm = torchmn.create_communicator(quiet=True)
streams = torchmn.seed_ranks(0, comm)
seen = {}  # what every rank must draw as one process does
own = {}  # what each rank must draw for itself once training has begun


def numbers():
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


class Augmented(Dataset):
    def __len__(self):
        return 9  # of which ranks have 5 and 4

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(1))])


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def drawn(loader):
    return torch.cat([*loader]).flatten().tolist()


# What scripts draw before there is a loader or an optimizer.
data = TensorDataset(torch.randn(25, 4).double(), torch.randn(25, 1).double())
train, valid = random_split(data, [17, 8])
seen["random_split"] = [*train.indices]
seen["train_test_split"] = train_test_split([*range(20)], test_size=0.3)[0]
seen["permutation"] = np.random.permutation(20).tolist()
files = [*"abcdefghijkl"]
random.shuffle(files)
seen["files"] = files
labelled = Subset(train, torch.randperm(17)[:14].tolist())
seen["labelled"] = labelled.indices
features = torch.randn(4, 6).double()  # a plain attribute of no module
target = network()  # frozen, as in random network distillation
target.requires_grad_(False)
net = network()
teacher = copy.deepcopy(net)
loader, valid_loader = torchmn.scatter_loader(
    (DataLoader(labelled, 5, shuffle=True), DataLoader(valid, 3)), comm
)
augmented = torchmn.scatter_loader(DataLoader(Augmented(), 9), comm)
workers = torchmn.scatter_loader(
    DataLoader(Augmented(), 9, num_workers=1, persistent_workers=True), comm
)
sampler = torchmn.GlobalSampler(9, comm, 9, seed=0)
global_workers = DataLoader(Augmented(), batch_sampler=sampler, num_workers=1)
shard = torchmn.scatter_dataset(Augmented(), comm, force_equal_length=False)
shard_workers = DataLoader(shard, 9, num_workers=1)
seen["everything made"] = numbers()
if comm.rank == 0:
    numbers()  # as to show some samples; rank 0 is as one process is
made = torch.randn(4, 2) if comm.rank == 0 else None
torchmn.scatter_dataset(made, comm)
seen["after a data set of rank 0"] = numbers()
if comm.rank == 0:
    numbers()

# Looking at the data is no training.
next(iter(loader))
seen["after a batch"] = numbers()
mean = comm.sum_over_ranks(sum(float(x.sum()) for x, _ in loader)) / (4 * len(labelled))
seen["after a mean"] = numbers()

optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), 0.05), comm, net)
seen["with an optimizer"] = numbers()
prune.random_unstructured(net[0], "weight", 0.3)
seen["pruned"] = net[0].weight_mask.tolist()
anchor = copy.deepcopy(target)
with torch.no_grad():
    for parameter in anchor.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
net.eval()
with torch.no_grad():
    for x, _ in valid_loader:
        net(x @ features)
net.train()
seen["after an evaluation"] = numbers()
next(iter(loader))
seen["after a batch, with an optimizer"] = numbers()
if comm.size > 1:
    own["augmented before"] = drawn(augmented)
    own["augmented before, again"] = drawn(augmented)
    own["workers before"] = drawn(workers)
    own["workers of GlobalSampler before"] = drawn(global_workers)
    own["workers of a shard before"] = drawn(shard_workers)
    everyone = comm.allgather_obj(numbers())
    assert everyone.count(everyone[0]) == comm.size, everyone
    assert streams.is_shared
streams = torchmn.seed_ranks(1, comm)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        out = net((x - mean) @ features)
        loss = nn.functional.mse_loss(out, y)
        loss = loss + nn.functional.mse_loss(out, target(x @ features).detach())
        loss = loss + 0.1 * nn.functional.mse_loss(out, teacher(x @ features).detach())
        for mine, pulled in zip(net[2].parameters(), anchor[2].parameters(), strict=True):
            loss = loss + 0.01 * (mine - pulled).square().sum()
        loss.backward()
        optimizer.step()
seen["trained"] = {name: value.tolist() for name, value in net.state_dict().items()}
assert not streams.is_shared
own["numbers"] = numbers()
own["dropout"] = nn.Dropout(0.5)(torch.ones(64)).tolist()
own["augmented"] = drawn(augmented)
own["workers"] = drawn(workers)
own["workers of GlobalSampler"] = drawn(global_workers)
own["workers of a shard"] = drawn(shard_workers)

# The next fold begins with shared numbers.
streams = torchmn.seed_ranks(0, comm)
seen["next fold"] = torch.randperm(9).tolist()
streams.fork()
own["forked by hand"] = numbers()

Path(sys.argv[1], f"{comm.rank}of{comm.size}.json").write_text(json.dumps([seen, own]))
comm.finalize()
