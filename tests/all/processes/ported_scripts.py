"""What is changed in four scripts of pytorch/examples to train them on many workers.

`docs/how-to/port-a-script.md` shows these lines. The scripts themselves are not in this project:
each change names its place by a part of one line of theirs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

BEGIN = ["import torchmn", "comm = torchmn.create_communicator(quiet=True)"]
SEED = "torchmn.seed_ranks(args.seed, comm)"
CONVERTED = "torchmn.nn.convert_batch_norm(model, comm)"


@dataclass(frozen=True)
class Change:
    """One place where lines are added after or before a line, or that line is another one.

    ``line`` is the whole line of theirs without the spaces around it; new lines get its
    indentation, less ``dedent`` spaces.
    """

    line: str
    new: list[str]
    how: Literal["after", "before", "instead"]
    dedent: int = 0

    def apply(self, lines: list[str]) -> list[str]:
        """The lines of a script with it. Raises LookupError: the line is not there just once."""
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise LookupError(f"{self.line!r} is {len(places)} times in the script, not once.")
        place = places[0]
        theirs = lines[place]
        spaces = " " * (len(theirs) - len(theirs.lstrip()) - self.dedent)
        new = [spaces + line for line in self.new]
        around = {"after": [theirs, *new], "before": [*new, theirs], "instead": new}[self.how]
        return [*lines[:place], *around, *lines[place + 1 :]]


@dataclass(frozen=True)
class Port:
    """A script, what is changed in it, and how it is compared."""

    folder: str
    changes: list[Change]
    arguments: list[str]  # of a short run
    # Not a part of the port: the same in both scripts, so that their losses can be compared.
    without_noise: list[Change] = field(default_factory=list)
    # A regular expression: the printed numbers that must be the same, in its groups.
    compared: str = ""
    needs_torchvision: bool = True
    tolerance: float = 5e-3  # of the parameters that the script saves

    @property
    def num_changed_lines(self) -> int:
        """Lines that are new or others."""
        return sum(len(change.new) for change in self.changes)

    def write(self, original: Path, target: Path, *, is_ported: bool, has_noise: bool) -> None:
        """Write the script into a file."""
        lines = original.read_text(encoding="utf-8").splitlines()
        for change in self.changes if is_ported else []:
            lines = change.apply(lines)
        for change in [] if has_noise else self.without_noise:
            lines = change.apply(lines)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


MNIST = Port(
    folder="mnist",
    changes=[
        Change("import torch", BEGIN, "after"),
        Change("torch.manual_seed(args.seed)", [SEED], "instead"),
        Change(
            "test_loader = torch.utils.data.DataLoader(dataset2, **test_kwargs)",
            [
                "train_loader, test_loader = torchmn.scatter_loader("
                "(train_loader, test_loader), comm)"
            ],
            "after",
        ),
        Change(
            "optimizer = optim.Adadelta(model.parameters(), lr=args.lr)",
            ["optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, model)"],
            "after",
        ),
        Change(
            "test_loss /= len(test_loader.dataset)",
            ["test_loss, correct = comm.sum_over_ranks(test_loss, correct)"],
            "before",
        ),
        Change("if args.save_model:", ["if args.save_model and comm.rank == 0:"], "instead"),
    ],
    arguments=["--epochs", "2", "--save-model"],
    without_noise=[
        Change("self.dropout1 = nn.Dropout(0.25)", ["self.dropout1 = nn.Dropout(0)"], "instead"),
        Change("self.dropout2 = nn.Dropout(0.5)", ["self.dropout2 = nn.Dropout(0)"], "instead"),
    ],
    compared=r"Test set: Average loss: ([\d.]+), Accuracy: (\d+)/",
)
VAE = Port(
    folder="vae",
    changes=[
        Change("import torch", BEGIN, "after"),
        Change("torch.manual_seed(args.seed)", [SEED], "instead"),
        Change(
            "from torchvision.utils import save_image",
            ["save_image = save_image if comm.rank == 0 else lambda *args, **options: None"],
            "after",
        ),
        Change(
            "class VAE(nn.Module):",
            ["train_loader = torchmn.scatter_loader(train_loader, comm)"],
            "before",
        ),
        Change(
            "optimizer = optim.Adam(model.parameters(), lr=1e-3)",
            [
                "optimizer = torchmn.create_multi_node_optimizer("
                'optimizer, comm, model, reduction="sum")'
            ],
            "after",
        ),
        Change(
            "epoch, train_loss / len(train_loader.dataset)))",
            ["epoch, comm.sum_over_ranks(train_loss) / len(train_loader.dataset)))"],
            "instead",
        ),
    ],
    arguments=["--epochs", "1"],
    without_noise=[
        Change("eps = torch.randn_like(std)", ["eps = torch.zeros_like(std)"], "instead")
    ],
    compared=r"====> (?:Epoch: \d+ Average|Test set) loss: ([\d.]+)",
)
LANGUAGE_MODEL = Port(
    folder="word_language_model",
    changes=[
        Change("import torch", BEGIN, "after"),
        Change("torch.manual_seed(args.seed)", [SEED], "instead"),
        Change(
            "corpus = data.Corpus(args.data)",
            ['args.save += "" if comm.rank == 0 else f".rank{comm.rank}"'],
            "after",
        ),
        Change(
            "train_data = batchify(corpus.train, args.batch_size)",
            [
                "train_data = batchify(corpus.train, args.batch_size)"
                "[:, slice(*torchmn.scatter_index(args.batch_size, comm))].contiguous()"
            ],
            "instead",
        ),
        Change(
            "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)",
            [
                "optimizer = torchmn.create_multi_node_optimizer("
                "optimizer if args.use_optimizer else torch.optim.SGD(model.parameters()), "
                "comm, model)"
            ],
            "after",
            dedent=4,
        ),
        Change(
            "hidden = model.init_hidden(args.batch_size)",
            ["hidden = model.init_hidden(train_data.size(1))"],
            "instead",
        ),
    ],
    # At the script's rate of 20 rounding grows: gradient norms differ by 4e-6 after 13 steps.
    arguments=["--epochs", "2", "--emsize", "64", "--nhid", "64", "--dropout", "0", "--lr", "1"],
    compared=r"(?:valid|test) loss +([\d.]+) \| (?:valid|test) ppl +([\d.]+)",
    needs_torchvision=False,
)
IMAGENET = Port(
    folder="imagenet",
    changes=[
        Change("import torch", BEGIN, "after"),
        Change("torch.manual_seed(args.seed)", [SEED], "instead"),
        Change(
            "scheduler = StepLR(optimizer, step_size=30, gamma=0.1)",
            [f"optimizer = torchmn.create_multi_node_optimizer(optimizer, comm, {CONVERTED})"],
            "before",
        ),
        Change(
            "if args.evaluate:",
            ["train_loader, val_loader = torchmn.scatter_loader((train_loader, val_loader), comm)"],
            "before",
        ),
        Change(
            "progress.display_summary()",
            [
                "top1.avg, top5.avg = (comm.sum_over_ranks(meter.sum) / "
                "comm.sum_over_ranks(meter.count) for meter in (top1, top5))"
            ],
            "before",
        ),
        Change(
            "if not args.multiprocessing_distributed or (args.multiprocessing_distributed",
            [
                "if comm.rank == 0 and not args.multiprocessing_distributed or ("
                "args.multiprocessing_distributed"
            ],
            "instead",
        ),
    ],
    # The script's own network, a ResNet-18 with 1,000 outputs, on small images.
    arguments=[
        *["photos", "--epochs", "2", "-b", "32", "-j", "1", "--seed", "1", "--no-accel"],
        *["--lr", "0.01"],
    ],
    # In float64, for the rounding of float32 grows in batch normalization with each step.
    without_noise=[
        Change(
            "from torch.utils.data import Subset",
            ["from torch.utils.data import Subset; torch.set_default_dtype(torch.float64)"],
            "instead",
        ),
        Change("transforms.RandomResizedCrop(224),", ["transforms.Resize((32, 32)),"], "instead"),
        Change("transforms.RandomHorizontalFlip(),", [], "instead"),
        Change("transforms.Resize(256),", ["transforms.Resize((32, 32)),"], "instead"),
        Change("transforms.CenterCrop(224),", [], "instead"),
    ],
    compared=r"\* +Acc@1 ([\d.]+) +Acc@5 ([\d.]+)",
    tolerance=1e-9,
)
PORTS = [MNIST, IMAGENET, LANGUAGE_MODEL, VAE]
