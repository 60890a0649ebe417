"""Whole tasks: representations, generation and reinforcement."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from .models import blobs, closure_of, layers, loader_of, seeded, step_by
from .registry import script
from .worker import Worker


def _views(num: int) -> tuple[Tensor, Tensor]:
    """Two distorted views of each sample, ``(num, 6)``."""
    x, noise = blobs(num)[0], torch.randn(2, num, 6, generator=seeded(3))
    return x + 0.3 * noise[0], x + 0.3 * noise[1]


@torch.no_grad()
def _follow(follower: nn.Module, model: nn.Module, momentum: float) -> None:
    """Move an average of a model's parameters on."""
    for own, new in zip(follower.parameters(), model.parameters(), strict=True):
        own.mul_(momentum).add_(new, alpha=1 - momentum)


class _Contrast(nn.Module):
    """Momentum contrast: the keys of former batches are in a queue."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self.queries, self.keys = layers(6, 8, 4), layers(6, 8, 4).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(24, 4, generator=seeded(2)), dim=1))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.queries(x), dim=1)
        _follow(self.keys, self.queries, 0.9)
        key = F.normalize(self.keys(other), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T], 1)
        self.queue = torch.cat([self.queue, self._worker.gather(key)])[-24:]
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


@script("MoCo: a momentum encoder, and a queue of the keys of all ranks in the order of the batch")
def moco(worker: Worker) -> nn.Module:
    model = _Contrast(worker)
    inner = torch.optim.SGD(model.queries.parameters(), 0.1, momentum=0.9)
    optimizer = worker.optimizer(inner, model)
    loader = loader_of(worker, TensorDataset(*_views(30)))
    for x, other in [*loader, *loader]:
        step_by(optimizer, model(x, other))
    return model


@script("DINO: a teacher that follows, the centre of its outputs kept by the script over all ranks")
def dino(worker: Worker) -> list[nn.Module]:
    student, teacher = layers(6, 8, 5), layers(6, 8, 5).requires_grad_(False)
    optimizer = worker.optimizer(torch.optim.AdamW(student.parameters(), 1e-2), student)
    center = torch.zeros(5)
    loader = loader_of(worker, TensorDataset(*_views(30)))
    for views in [*loader, *loader]:
        wanted = [teacher(view) for view in views]
        losses = []
        for view, target in zip(views, reversed(wanted), strict=True):
            target = ((target - center) / 0.2).softmax(1)
            losses.append(-(target * (student(view) / 0.5).log_softmax(1)).sum(1).mean())
        step_by(optimizer, torch.stack(losses).mean())
        _follow(teacher, student, 0.9)
        num, sums = worker.sum_over_ranks(2 * len(views[0]), torch.cat(wanted).sum(0))
        center = 0.9 * center + 0.1 * sums / num
    worker.log("center", center)
    return [student, teacher]


class _ByClass(Sampler[list[int]]):
    """Batches of three classes with three samples each."""

    def __init__(self, labels: Tensor) -> None:
        self._of_class = [(labels == label).nonzero()[:, 0] for label in range(3)]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            orders = [torch.randperm(len(c), generator=seeded(number)) for c in self._of_class]
            rows = [c[order[:3]] for c, order in zip(self._of_class, orders, strict=True)]
            yield torch.cat(rows).tolist()


@script("Metric learning: batches by class, the hardest triplets of the whole batch")
def triplets(worker: Worker) -> nn.Module:
    x, y = blobs(40)
    batches = DataLoader(TensorDataset(x, y), batch_sampler=_ByClass(y))
    model = layers(6, 8, 4)
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    optimizer = worker.optimizer(inner, model, weight="rank")
    for own, labels in worker.scatter_loader(batches):
        outputs = worker.gather_with_gradient(F.normalize(model(own), dim=1))
        labels = worker.gather(labels)
        distances = (2 - 2 * outputs @ outputs.T).clamp(min=1e-9).sqrt()
        is_same = labels[:, None] == labels
        far = distances.masked_fill(~is_same, -1).max(1).values
        near = distances.masked_fill(is_same, 9).min(1).values
        step_by(optimizer, (far - near + 0.3).relu().mean())
    return model


class _TwoEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = layers(4, 4), layers(2, 4, seed=1)
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> list[Tensor]:
        return [F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)]


@script("CLIP: two encoders, a learned temperature that is clamped after each step, batches of 9")
def clip(worker: Worker) -> nn.Module:
    x, _ = blobs(40)
    model = _TwoEncoders()
    matrices = [p for p in model.parameters() if p.dim()]
    groups = [{"params": [model.scale], "weight_decay": 0.0}, {"params": matrices}]
    optimizer = worker.optimizer(torch.optim.AdamW(groups, 1e-2), model, weight="rank")
    loader = loader_of(worker, TensorDataset(x[:, :4], x[:, 4:]), 9)
    for batch in [*loader, *loader]:
        image, text = (worker.gather_with_gradient(each) for each in model(*batch))
        scores, pairs = model.scale.exp() * image @ text.T, torch.arange(len(image))
        step_by(optimizer, F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs))
        with torch.no_grad():
            model.scale.clamp_(0, 2.6)
    return model


@script("A memory bank of former outputs, kept by the script and gathered from all ranks")
def memory_bank(worker: Worker) -> nn.Module:
    model = layers(6, 8, 4)
    optimizer = worker.optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    bank, bank_labels = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)
    for x, y in loader_of(worker, TensorDataset(*blobs(60))):
        outputs = F.normalize(model(x), dim=1)
        bank = torch.cat([bank, worker.gather(outputs.detach())])[-24:]
        bank_labels = torch.cat([bank_labels, worker.gather(y)])[-24:]
        distances, is_same = 1 - outputs @ bank.T, y[:, None] == bank_labels
        attracted = (distances * is_same).sum(1) / is_same.sum(1)
        step_by(optimizer, (attracted + ((0.5 - distances).relu() * ~is_same).sum(1)).mean())
    return model


@script("Wasserstein GAN with a gradient penalty between data and samples, two optimizers")
def critic_and_generator(worker: Worker) -> list[nn.Module]:
    generator, critic = layers(4, 8, 6), layers(6, 8, 1)
    optimizers = [
        worker.optimizer(torch.optim.Adam(m.parameters(), 1e-2, betas=(0.5, 0.9)), m)
        for m in (generator, critic)
    ]
    noise, shares = torch.randn(50, 4, generator=seeded(2)), torch.rand(50, 1, generator=seeded(3))
    loader = loader_of(worker, TensorDataset(blobs(50)[0], noise, shares))
    for number, (x, z, share) in enumerate(loader):
        made = generator(z).detach()
        between = (share * x + (1 - share) * made).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        step_by(optimizers[1], critic(made).mean() - critic(x).mean() + 10 * penalty)
        if number % 3 == 2:
            step_by(optimizers[0], -critic(generator(z)).mean())
    return [generator, critic]


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(6, 8, 6), layers(3, 8, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        return self.decoder(mean + noise * (log_variance / 2).exp()), divergence


@script("A VAE: sums, `reduction='sum'`, divergence annealed by the step and clamped per sample")
def vae(worker: Worker) -> nn.Module:
    model = _Autoencoder()
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    optimizer = worker.optimizer(inner, model, reduction="sum")
    loader = loader_of(worker, TensorDataset(blobs(37)[0], torch.randn(37, 3, generator=seeded(2))))
    for number, (x, noise) in enumerate([*loader, *loader]):
        decoded, divergence = model(x, noise)
        loss = (decoded - x).square().sum() + min(1, number / 6) * divergence.clamp(min=0.05).sum()
        step_by(optimizer, loss)
        worker.log("loss", worker.sum_over_ranks(loss.item(), 0)[0])
    return model


class _FirstBatchNorm(nn.Module):
    """Its parameters come from the first batch, as those of ActNorm in a flow."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = (nn.Parameter(torch.zeros(6)) for _ in range(2))
        self.register_buffer("is_ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
                self.is_ready.fill_(1)
        return (x - self.shift) * self.log_scale.exp()


@script("A layer that takes its parameters from the first batch, run once before wrapping")
def first_batch(worker: Worker) -> nn.Module:
    x, y = blobs(37)
    model = nn.Sequential(_FirstBatchNorm(), layers(6, 8, 3))
    with torch.no_grad():
        model(x[:10])
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for own, labels in loader_of(worker, TensorDataset(x, y)):
        step_by(optimizer, F.cross_entropy(model(own), labels))
    return model


class _Adjoint(torch.autograd.Function):
    """Solves an equation, and in backward another one, which runs autograd itself."""

    @staticmethod
    def forward(ctx: Any, slope: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.slope, ctx.parameters = slope, parameters
        for _ in range(4):
            x = x + slope(x) / 4
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        total = [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for _ in range(4):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slope = ctx.slope(x)
                own, *others = torch.autograd.grad(slope, (x, *ctx.parameters), grad)
            x, grad = x - slope / 4, grad + own / 4
            total = [each + other / 4 for each, other in zip(total, others, strict=True)]
        return None, grad, *total


class _Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.head = layers(6, 8, 6), layers(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Adjoint.apply(self.slope, x, *self.slope.parameters()))


class _Equilibrium(nn.Module):
    """The gradient of a fixed point, by a hook that solves for it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.inner, self.head = layers(6, 5), layers(5, 5, seed=1), layers(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        def improved(state: Tensor) -> Tensor:
            return (0.5 * self.inner(state) + self.input(x)).tanh()

        state = torch.zeros(len(x), 5)
        with torch.no_grad():
            for _ in range(30):
                state = improved(state)
        state = improved(state)
        fixed = state.detach().requires_grad_()
        again = improved(fixed)

        def solve(grad: Tensor) -> Tensor:
            total = grad
            for _ in range(30):
                total = torch.autograd.grad(again, fixed, total, retain_graph=True)[0] + grad
            return total

        state.register_hook(solve)
        return self.head(state)


def _classify(worker: Worker, model: nn.Module) -> nn.Module:
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for x, y in loader_of(worker, TensorDataset(*blobs(37))):
        step_by(optimizer, F.cross_entropy(model(x), y))
    return model


@script("A neural ODE by the adjoint method: a Function whose backward runs autograd itself")
def neural_ode(worker: Worker) -> nn.Module:
    return _classify(worker, _Equation())


@script("A deep equilibrium model: a hook in backward runs autograd until it converges")
def equilibrium(worker: Worker) -> nn.Module:
    return _classify(worker, _Equilibrium())


def _play(policy: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """One episode: log probabilities of actions and the returns after them."""
    g = seeded(seed)
    place, chosen, rewards = torch.rand(2, generator=g) - 0.5, [], []
    while len(rewards) < 8 and place.abs().max() < 0.8:
        scores = policy(place[None])[0].log_softmax(0)
        action = int(torch.multinomial(scores.detach().exp(), 1, generator=g))
        place = place + (0.2 if action else -0.2)
        chosen.append(scores[action])
        rewards.append(-place.abs().sum())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(chosen), returns


@script("REINFORCE: episodes of different lengths, each with a seed, divided; a running baseline")
def reinforce(worker: Worker) -> nn.Module:
    policy = layers(2, 8, 2)
    inner = torch.optim.Adam(policy.parameters(), 1e-2)
    optimizer = worker.optimizer(inner, policy, reduction="sum")
    baseline = 0.0
    for number in range(4):
        episodes = [_play(policy, 100 * number + seed) for seed in worker.share(7)]
        chosen, returns = (torch.cat(each) for each in zip(*episodes, strict=True))
        num, total = worker.sum_over_ranks(len(returns), returns.sum().item())
        optimizer.zero_grad()
        (-(chosen * (returns - baseline)).sum() / num).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        baseline = 0.9 * baseline + 0.1 * total / num
        worker.log("baseline", baseline)
    return policy


@script("PPO: several passes over what was played, stopped by the divergence over all ranks")
def ppo(worker: Worker) -> nn.Module:
    model = layers(3, 8, 3)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 2e-2), model)
    for number in range(2):
        states, every = torch.randn(24, 3, generator=seeded(number)), torch.arange(24)
        with torch.no_grad():
            scores, value = model(states).split([2, 1], 1)
            action = torch.multinomial(scores.softmax(1), 1, generator=seeded(number))[:, 0]
            old = scores.log_softmax(1)[every, action]
        reward = torch.where(action == (states[:, 0] > 0), 1.0, -1.0)
        advantage = reward - value[:, 0]
        advantage = (advantage - advantage.mean()) / advantage.std()
        loader = loader_of(worker, TensorDataset(states, action, old, advantage, reward))
        for x, taken, before, gain, target in [*loader, *loader]:
            scores, value = model(x).split([2, 1], 1)
            now = scores.log_softmax(1).gather(1, taken[:, None])[:, 0]
            divergence, num = worker.sum_over_ranks((before - now).sum().item(), len(x))
            worker.log("divergence", divergence / num)
            if divergence / num > 0.03:
                break
            ratio = (now - before).exp()
            gains = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            step_by(optimizer, F.mse_loss(value[:, 0], target) - gains.mean())
    return model


@script("An evolution strategy: no backward pass, the gradient of all ranks' trials is assigned")
def evolution(worker: Worker) -> nn.Module:
    (x, y), model = blobs(20), layers(6, 3)
    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 3e-2), model)
    to_vector, assign = nn.utils.parameters_to_vector, nn.utils.vector_to_parameters
    for number in range(4):
        middle = to_vector(model.parameters()).detach().clone()
        changes = torch.randn(7, len(middle), generator=seeded(number))
        scores = torch.zeros(7)
        for trial in worker.share(7):
            assign(middle + 0.1 * changes[trial], model.parameters())
            scores[trial] = -F.cross_entropy(model(x), y).detach()
        assign(middle, model.parameters())
        scores, _ = worker.sum_over_ranks(scores, 0)
        gradient = -((scores - scores.mean()) / scores.std()) @ changes / 0.7
        pieces = gradient.split([p.numel() for p in model.parameters()])
        for parameter, piece in zip(model.parameters(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        optimizer.step()
    return model


def _residual(model: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Of u'' = -sin x, squared."""
    points = points.detach().requires_grad_()
    value = model(points)
    for _ in range(2):
        (value,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    return (value + points.sin()).square().mean()


@script("A physics-informed network: points divided, boundary on all ranks, `Adam`, then `LBFGS`")
def physics(worker: Worker) -> nn.Module:
    points = 3 * torch.rand(21, 1, generator=seeded(2))
    border = torch.tensor([[0.0], [3.0]])
    model = layers(1, 8, 1)

    def loss(own: Tensor) -> Tensor:
        worker.set_weight(optimizer, len(own))
        return _residual(model, own) + model(border).square().mean()

    optimizer = worker.optimizer(torch.optim.Adam(model.parameters(), 1e-2), model)
    for (own,) in loader_of(worker, TensorDataset(points)):
        step_by(optimizer, loss(own))
    worker.close(optimizer)
    optimizer = worker.optimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), model)

    closure = closure_of(optimizer, lambda: loss(points[list(worker.share(21))]))
    worker.log("loss", optimizer.step(closure))
    return model
