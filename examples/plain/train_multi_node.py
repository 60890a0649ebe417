"""Train a network on scans of handwritten digits, on any number of ranks.

    torchmn run -n 2 examples/plain/train_multi_node.py --epochs 5 --save digits.pt

Seven lines differ from `train.py`, and both print the same numbers.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchmn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--save", help="a file for the trained parameters")
    options = parser.parse_args()

    comm = torchmn.create_communicator(quiet=True)
    torchmn.seed_ranks(0, comm)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1400], labels[:1400])
    test = TensorDataset(images[1400:], labels[1400:])
    train_loader = DataLoader(train, options.batch_size, shuffle=True)
    test_loader = DataLoader(test, 100)
    train_loader, test_loader = torchmn.scatter_loader((train_loader, test_loader), comm)

    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    model.to(device)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(options.epochs):
        model.train()
        train_loss = 0.0
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            train_loss += loss.item() * len(x)
        scheduler.step()

        model.eval()
        test_loss, num_correct = 0.0, 0
        with torch.no_grad():
            for x, y in test_loader:
                x, y = x.to(device), y.to(device)
                output = model(x)
                test_loss += loss_function(output, y).item() * len(x)
                num_correct += (output.argmax(1) == y).sum().item()
        train_loss, test_loss, num_correct = comm.sum_over_ranks(train_loss, test_loss, num_correct)
        print(
            f"epoch {epoch}: training loss {train_loss / len(train):.5f}, "
            f"test loss {test_loss / len(test):.5f}, accuracy {num_correct}/{len(test)}"
        )

    if options.save and comm.rank == 0:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
