"""Whole tasks: images, speech, language, series, graphs and molecules."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch.optim.lr_scheduler import PolynomialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .models import blobs, built, layers, loader_of, seeded, steps
from .registry import script
from .worker import Worker

Boxes = dict[str, Tensor]


def _images_with_boxes(num: int) -> list[tuple[Tensor, Boxes]]:
    g, items = seeded(3), []
    for _ in range(num):
        corners = torch.rand(1 + int(torch.randint(3, (1,), generator=g)), 2, generator=g) * 0.6
        sizes = 0.1 + 0.3 * torch.rand(len(corners), 2, generator=g)
        labels = torch.randint(1, 3, (len(corners),), generator=g)
        boxes = torch.cat([corners, corners + sizes], 1)
        items.append((torch.randn(3, 16, 16, generator=g), {"boxes": boxes, "labels": labels}))
    return items


class _Detector(nn.Module):
    """One anchor for each of 4 x 4 places; it returns its losses, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 6, 3, 2, 1), nn.Tanh()]
        self.body = nn.Sequential(*stages)
        self.classes, self.offsets = nn.Conv2d(6, 3, 1), nn.Conv2d(6, 4, 1)
        centers = torch.cartesian_prod(*[(torch.arange(4) + 0.5) / 4] * 2)
        self.register_buffer("anchors", torch.cat([centers - 0.2, centers + 0.2], 1))

    def forward(self, images: tuple[Tensor, ...], targets: tuple[Boxes, ...]) -> dict[str, Tensor]:
        x = self.body(torch.stack(images))
        outputs = [head(x).flatten(2).transpose(1, 2) for head in (self.classes, self.offsets)]
        losses = [self._losses(*each) for each in zip(*outputs, targets, strict=True)]
        by_class, by_box = zip(*losses, strict=True)
        return {"class": torch.stack(by_class).mean(), "box": torch.stack(by_box).mean()}

    def _losses(self, scores: Tensor, offsets: Tensor, target: Boxes) -> tuple[Tensor, Tensor]:
        a, b = self.anchors, target["boxes"]
        sides = torch.min(a[:, None, 2:], b[:, 2:]) - torch.max(a[:, None, :2], b[:, :2])
        inside = sides.clamp(min=0).prod(2)
        area, other = ((each[:, 2:] - each[:, :2]).prod(1) for each in (a, b))
        overlap = inside / (area[:, None] + other - inside)
        best, which = overlap.max(1)
        best[overlap.argmax(0)] = 1.0
        labels = torch.where(best > 0.4, target["labels"][which], 0)
        found = labels > 0
        losses = F.cross_entropy(scores, labels, reduction="none")
        num_hard = min(3 * int(found.sum()), int((~found).sum()))
        hard = losses.masked_fill(found, -1).topk(num_hard).values
        box = F.smooth_l1_loss(offsets[found], b[which][found])
        return (losses[found].sum() + hard.sum()) / found.sum(), box


@script("Detection: boxes in lists of different lengths, anchors, hard negatives of each image")
def detection(worker: Worker) -> nn.Module:
    data = _images_with_boxes(15)
    loader = loader_of(worker, data, 4, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    model = built(_Detector)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    for _ in range(2):
        for images, targets in loader:
            losses = model(images, targets)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
    return model


@script("Segmentation: `ignore_index`, `set_weight()` with the pixels that count, IoU over ranks")
def segmentation(worker: Worker) -> nn.Module:
    x = torch.randn(19, 3, 8, 8, generator=seeded(2))
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    y[torch.rand(y.shape, generator=seeded(3)) < 0.3] = 255
    y[::3, :4] = 255
    train = loader_of(worker, TensorDataset(x[:14], y[:14]), 4)
    test = worker.scatter_loader(DataLoader(TensorDataset(x[14:], y[14:]), 4))
    model = built(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Conv2d(6, 3, 1))
    )
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    scheduler = PolynomialLR(optimizer, 8)
    confusion = torch.zeros(9, dtype=torch.long)
    for _ in range(2):
        for image, mask in train:
            optimizer.zero_grad()
            worker.set_weight(optimizer, int((mask != 255).sum()))
            F.cross_entropy(model(image), mask, ignore_index=255).backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            for image, mask in test:
                pairs = 3 * mask + model(image).argmax(1)
                confusion += torch.bincount(pairs[mask != 255], minlength=9)
    worker.log("confusion", worker.sum_over_ranks(confusion, 0)[0])
    return model


class _Listener(nn.Module):
    """Of packed sequences, to log probabilities ``(time, samples, 6)``."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(5, 6, bidirectional=True), nn.Linear(12, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden, _ = pad_packed_sequence(self.cells(pack_padded_sequence(x, lengths))[0])
        return self.head(hidden).log_softmax(2)


def _utterances(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    x, y = zip(*sorted(batch, key=lambda sample: -len(sample[0])), strict=True)
    lengths = (torch.tensor([len(each) for each in field]) for field in (x, y))
    return pad_sequence(x), torch.cat(y), *lengths


@script("Speech: packed sequences sorted by length, the time first, CTC, clipped by norm")
def speech(worker: Worker) -> nn.Module:
    g = seeded(5)
    long, short = (torch.randint(*limits, (11,), generator=g) for limits in ((8, 20), (1, 4)))
    data = [
        (torch.randn(n, 5, generator=g), torch.randint(1, 6, (m,), generator=g))
        for n, m in zip(long.tolist(), short.tolist(), strict=True)
    ]
    loader = loader_of(worker, data, 4, collate_fn=_utterances)
    model = built(_Listener)
    optimizer = worker.optimizer(torch.optim.AdamW(model.parameters(), 1e-2), model)
    for _ in range(2):
        for x, y, x_lengths, y_lengths in steps(optimizer, loader):
            worker.set_weight(optimizer, len(x_lengths))
            loss = F.ctc_loss(model(x, x_lengths), y, x_lengths, y_lengths, zero_infinity=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    return model


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(20, 6), nn.LSTM(6, 10)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(10, 20, [4, 10], div_value=2)

    def forward(self, x: Tensor, y: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.cells(self.embedding(x), state)
        return self.head(output.flatten(0, 1), y.flatten()).loss, state


@script("Language model: an adaptive softmax, states carried on, columns divided unevenly")
def carried_states(worker: Worker) -> nn.Module:
    text = torch.randint(20, (5 * 21,), generator=seeded(2)) ** 2 // 20
    columns = worker.share(5)
    text = text.view(5, 21).T[:, columns.start : columns.stop].contiguous()
    model = built(_Reader)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.5), model)
    for _ in range(2):
        state = None
        for begin in range(0, 20, 5):
            x, y = text[begin : begin + 5], text[begin + 1 : begin + 6]
            state = None if state is None else tuple(each.detach() for each in state)
            worker.set_weight(optimizer, len(columns))
            loss, state = model(x, y, state)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    return model


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells = nn.Embedding(9, 6), nn.GRU(6, 8)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.cells(x._replace(data=self.embedding(x.data)))[1]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(9, 6), nn.GRU(6, 8), nn.Linear(8, 9)

    def forward(self, words: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = self.cells(self.embedding(words), state)
        return self.head(output), state


def _packed(batch: list[tuple[Tensor, Tensor]]) -> tuple[PackedSequence, Tensor]:
    source, target = zip(*batch, strict=True)
    return pack_sequence(source, enforce_sorted=False), pad_sequence(target)


@script("Translation: an optimizer for the encoder, one for the decoder, teacher forcing in turns")
def translation(worker: Worker) -> list[nn.Module]:
    g, data = seeded(4), []
    for length in torch.randint(2, 6, (22,), generator=g).tolist():
        source = torch.randint(3, 9, (length,), generator=g)
        data.append((source, torch.cat([source.flip(0), torch.tensor([2])])))
    loader = loader_of(worker, data, 6, collate_fn=_packed)
    encoder, decoder = built(_Encoder), built(_Decoder)
    both = (encoder, decoder)
    optimizers = [worker.optimizer(torch.optim.Adam(m.parameters(), 1e-2), m) for m in both]
    for number, (source, target) in enumerate([*loader, *loader]):
        num_words = int((target != 0).sum())
        state, words = encoder(source), torch.ones_like(target[:1])
        losses = []
        for wanted in target:
            scores, state = decoder(words, state)
            losses.append(F.cross_entropy(scores[0], wanted, ignore_index=0, reduction="sum"))
            words = wanted[None] if number % 2 else scores.argmax(2)
        for optimizer in optimizers:
            worker.set_weight(optimizer, num_words)
            optimizer.zero_grad()
        (torch.stack(losses).sum() / num_words).backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    return [encoder, decoder]


class _SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Embedding(30, 6, sparse=True) for _ in range(2))

    def forward(self, center: Tensor, near: Tensor, far: Tensor) -> Tensor:
        center = self.inner(center)
        attracted = F.logsigmoid((center * self.outer(near)).sum(1))
        repelled = F.logsigmoid(-torch.einsum("ij,ikj->ik", center, self.outer(far))).sum(1)
        return -(attracted + repelled).mean()


@script("word2vec: two sparse embeddings, negatives made by `collate_fn`, the rate set by hand")
def word2vec(worker: Worker) -> nn.Module:
    corpus = (30 * torch.rand(60, generator=seeded(2)) ** 3).long().tolist()
    pairs = [*pairwise(corpus), *pairwise(corpus[::-1])]

    def collate(batch: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        far = [torch.randint(30, (4,), generator=seeded(31 * a + b)) for a, b in batch]
        return *torch.tensor(batch).T, torch.stack(far)

    loader = loader_of(worker, pairs, 16, collate_fn=collate)
    model = built(_SkipGram)
    optimizer = worker.optimizer(torch.optim.SparseAdam(model.parameters(), 1e-2), model)
    for number, batch in enumerate([*loader, *loader]):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - number / 20)
    return model


class _Windows(Dataset[tuple[Tensor, Tensor]]):
    """12 values of a series, and the 3 after them."""

    def __init__(self, series: Tensor) -> None:
        self._series = series

    def __len__(self) -> int:
        return len(self._series) - 14

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        return self._series[start : start + 12], self._series[start + 12 : start + 15]


@script("Forecasting: sliding windows, `ReduceLROnPlateau` on errors of a later part of the series")
def forecasting(worker: Worker) -> nn.Module:
    series = (0.3 * torch.arange(120)).sin() + 0.1 * torch.randn(120, generator=seeded(2))
    train = loader_of(worker, _Windows(series[:80]), 32)
    test = worker.scatter_loader(DataLoader(_Windows(series[68:]), 16))
    model = layers(12, 8, 3)
    optimizer = worker.optimizer(torch.optim.RMSprop(model.parameters(), 1e-2), model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
    for _ in range(3):
        for x, y in steps(optimizer, train):
            F.huber_loss(model(x), y).backward()
        squares, num = 0.0, 0
        with torch.no_grad():
            for x, y in test:
                squares += F.mse_loss(model(x), y, reduction="sum").item()
                num += y.numel()
        squares, num = worker.sum_over_ranks(squares, num)
        scheduler.step(squares / num)
        worker.log("error", squares / num)
        worker.log("rate", optimizer.param_groups[0]["lr"])
    return model


class _GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.second((adjacency @ self.first(x)).tanh())


@script("A graph network on one graph: its training nodes divided, stopped early by the others")
def one_graph(worker: Worker) -> nn.Module:
    x, y = blobs(36)
    near = torch.cdist(x, x) < 2.5
    adjacency = near / near.sum(1, keepdim=True)
    train, test = range(15), range(15, 36)
    own = [train[i] for i in worker.share(len(train))]
    model = built(_GraphNetwork)
    inner = torch.optim.Adam(model.parameters(), 3e-2, weight_decay=5e-4)
    optimizer = worker.optimizer(inner, model)
    best = float("inf")
    for _ in range(20):
        optimizer.zero_grad()
        worker.set_weight(optimizer, len(own))
        F.cross_entropy(model(x, adjacency)[own], y[own]).backward()
        optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(x, adjacency)[test], y[test]).item()
        worker.log("loss", loss)
        if loss > best - 0.01:
            break
        best = loss
    return model


class _Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        hidden = self.own(x[: len(places)]) + self.other(x[places].mean(1))
        return self.head(hidden.tanh())


@script("A graph network on sampled neighbours, `set_weight()` with the nodes that have a loss")
def sampled_neighbours(worker: Worker) -> nn.Module:
    x, y = blobs(42)
    neighbours = torch.randint(42, (42, 4), generator=seeded(2))

    def collate(nodes: list[int]) -> tuple[Tensor, ...]:
        others = [int(node) for node in neighbours[nodes].unique() if int(node) not in nodes]
        place = {node: number for number, node in enumerate([*nodes, *others])}
        places = torch.tensor([[place[int(n)] for n in neighbours[node]] for node in nodes])
        return x[[*place]], places, y[nodes]

    loader = loader_of(worker, range(42), 8, collate_fn=collate)
    model = built(_Neighbours)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for values, places, labels in [*loader, *loader]:
        worker.set_weight(optimizer, len(labels))
        optimizer.zero_grad()
        F.cross_entropy(model(values, places), labels).backward()
        optimizer.step()
    return model


class _Potential(nn.Module):
    """Energies of molecules, and the forces on their atoms by a derivative of these."""

    def __init__(self) -> None:
        super().__init__()
        self.atom = layers(3, 8, 1)

    def forward(self, positions: Tensor, molecule: Tensor, num: int) -> tuple[Tensor, Tensor]:
        positions.requires_grad_()
        energies = torch.zeros(num).index_add(0, molecule, self.atom(positions)[:, 0])
        (slopes,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -slopes


def _molecules(batch: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    molecule = torch.cat([torch.full((len(each),), i) for i, each in enumerate(batch)])
    return torch.cat(batch), molecule, len(batch)


@script(
    "Molecules: forces by double backward; a mean over molecules and one over atoms, each a sum "
    "divided by the count of all ranks, `reduction='sum'`"
)
def molecules(worker: Worker) -> nn.Module:
    g = seeded(2)
    sizes = torch.randint(2, 6, (20,), generator=g).tolist()
    data = [torch.randn(size, 3, generator=g) for size in sizes]
    loader = loader_of(worker, data, 6, collate_fn=_molecules)
    model = _Potential()
    inner = torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
    optimizer = worker.optimizer(inner, model, reduction="sum")
    for positions, molecule, own_num in [*loader, *loader]:
        num, num_atoms = worker.sum_over_ranks(own_num, len(positions))
        energies, forces = model(positions, molecule, own_num)
        loss = (energies - 1).square().sum() / num
        loss = loss + 10 * (forces + positions).square().sum() / (3 * num_atoms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.log("loss", worker.sum_over_ranks(loss.item(), 0)[0])
    return model


class _Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Parameter(torch.rand(1, 3, 8, 8, generator=seeded(1)))


@script("Style transfer: an image is the parameter, `LBFGS`, pixels clamped in its closure")
def style_transfer(worker: Worker) -> nn.Module:
    network = built(lambda: nn.Conv2d(3, 6, 3)).requires_grad_(False)
    image = _Image()
    content = network(image.pixels).detach() + 0.1
    styles = torch.rand(5, 3, 8, 8, generator=seeded(2))

    def grams(images: Tensor) -> Tensor:
        return torch.einsum("nchw,ndhw->ncd", network(images), network(images)) / 36

    own = grams(styles[list(worker.share(5))])
    optimizer = worker.optimizer(torch.optim.LBFGS(image.parameters(), max_iter=4), image)

    def closure() -> Tensor:
        with torch.no_grad():
            image.pixels.clamp_(0, 1)
        optimizer.zero_grad()
        worker.set_weight(optimizer, len(own))
        loss = F.mse_loss(network(image.pixels), content)
        loss = loss + 5 * (grams(image.pixels) - own).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return image
