"""Train a network on scans of handwritten digits, as an ordinary script for one process.

    python examples/plain/train.py --epochs 5 --save digits.pt

`train_multi_node.py` is this script for any number of ranks.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--save", help="a file for the trained parameters")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1400], labels[:1400])
    test = TensorDataset(images[1400:], labels[1400:])
    train_loader = DataLoader(train, options.batch_size, shuffle=True)
    test_loader = DataLoader(test, 100)

    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    model.to(device)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
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
        print(
            f"epoch {epoch}: training loss {train_loss / len(train):.5f}, "
            f"test loss {test_loss / len(test):.5f}, accuracy {num_correct}/{len(test)}"
        )

    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
