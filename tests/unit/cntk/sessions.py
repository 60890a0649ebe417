"""A small training under a session: its loss is known at every minibatch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import torchmn.cntk as C
from torchmn.cntk.readers import MinibatchSourceFromData
from torchmn.comm import Communicator

NUM_SAMPLES = 25


class Line(nn.Module):
    """A least squares fit, with a parameter that is large enough to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 800), 0.01))
        direction = torch.linspace(0.2, 1, 800)
        self.direction = direction / direction.norm()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.direction


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y.reshape(-1)) ** 2


def is_far(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y.reshape(-1)).abs() > 0.5).float()


def source(
    num: int = NUM_SAMPLES, *, max_sweeps: int = 1, seed: int = 0, **options: Any
) -> MinibatchSourceFromData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]])
    if "max_samples" not in options:
        options["max_sweeps"] = max_sweeps
    return MinibatchSourceFromData({"x": x, "y": y}, **options)


class Recorder(C.ProgressWriter):
    """Keeps what writers are given."""

    def __init__(self) -> None:
        super().__init__(freq=1)
        self.losses: list[float] = []
        self.epochs: list[tuple[int, int]] = []
        self.tests: list[tuple[int, int]] = []

    def on_write_training_update(
        self, samples: Any, updates: Any, aggregate_loss: Any, aggregate_metric: Any
    ) -> None:
        total = aggregate_loss[1] - aggregate_loss[0]
        self.losses.append(total / (samples[1] - samples[0]))

    def on_write_training_summary(
        self, samples: int, updates: int, summaries: int, *rest: Any
    ) -> None:
        self.epochs.append((summaries, samples))

    def on_write_test_summary(self, samples: int, updates: int, *rest: Any) -> None:
        self.tests.append((samples, updates))


class Training:
    """A trainer of one rank with its recorder."""

    def __init__(self, comm: Communicator, learner: str = "plain") -> None:
        self.comm = comm
        self.model = Line()
        self.recorder = Recorder()
        sgd = C.momentum_sgd(
            self.model.parameters(),
            C.learning_rate_schedule(0.01, C.UnitType.sample),
            C.momentum_as_time_constant_schedule(10),
        )
        made = {
            "plain": lambda: C.data_parallel_distributed_learner(sgd, comm=comm),
            "1bit": lambda: C.data_parallel_distributed_learner(
                sgd, num_quantization_bits=1, comm=comm
            ),
            "block": lambda: C.block_momentum_distributed_learner(sgd, 9, comm=comm),
        }
        self.trainer = C.Trainer(self.model, (squared, is_far), made[learner](), self.recorder)

    def run(self, train: Any = None, mb_size: Any = 4, **options: Any) -> C.Evaluation | None:
        train = source() if train is None else train
        inputs = {"x": train.streams.x, "y": train.streams.y}
        return C.training_session(self.trainer, train, mb_size, inputs, **options).train()

    def state(self) -> Mapping[str, Any]:
        weight = self.model.weight.detach()
        return {"weight": weight.clone(), "losses": list(self.recorder.losses)}
