"""Run on two ranks by test_checks.py: each check says "ok" or why not."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import torchmn
from tests.all.frameworks.task import (
    BATCH,
    NUM_EPOCHS,
    Net,
    in_blocks,
    run_checks,
    same_bits,
    same_numbers,
    samples,
    sgd,
    train,
)
from torchmn.train.frameworks import ExchangeOptions, attach

comm = torchmn.create_communicator("flat", timeout_s=60)
FLAT = {"communicator": "flat", "timeout_s": 60}


class Model(nn.Module):
    """With the interface that the Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, number: int = 48) -> None:
        self.inputs, self.labels = samples(number)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class InOrder(Trainer):
    """A user's own subclass: samples come in the order of the data set."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def folder() -> Path:
    return Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))


def trainer(
    options: ExchangeOptions | None = None, *, is_attached: bool = True, **settings: Any
) -> InOrder:
    model = Model()
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder()),
            "per_device_train_batch_size": BATCH // 2,
            "num_train_epochs": NUM_EPOCHS,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            "seed": 3,
            **settings,
        }
    )
    own = InOrder(
        model,
        arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(13),
        optimizers=(sgd(model.parameters()), None),
        compute_metrics=errors,
    )
    assert own.args.world_size == 2
    return attach(own, options or ExchangeOptions(**FLAT)) if is_attached else own


def errors(prediction: Any) -> dict[str, float]:
    difference = prediction.predictions - prediction.label_ids
    return {"number": len(difference), "mse": float((difference**2).mean())}


def fit(options: ExchangeOptions | None = None, **settings: Any) -> nn.Module:
    own = trainer(options, **settings)
    own.train()
    return own.accelerator.unwrap_model(own.model).net


def plain(**settings: Any) -> nn.Module:
    return train(in_blocks(comm.rank, 2), comm=comm, **settings)


def alone(**settings: Any) -> nn.Module:
    return train(in_blocks(0, 1), **settings)


def as_ddp() -> None:
    """The Trainer by itself: the same numbers, and the same losses and norms in its log."""
    ours, theirs = trainer(max_grad_norm=0.3), trainer(is_attached=False, max_grad_norm=0.3)
    ours.train()
    theirs.train()
    assert isinstance(theirs.model_wrapped, DistributedDataParallel)
    assert not isinstance(ours.model_wrapped, DistributedDataParallel)
    same_numbers(ours.model.net, theirs.model.net)
    logs = [
        [(row["loss"], row["grad_norm"]) for row in own.state.log_history if "loss" in row]
        for own in (ours, theirs)
    ]
    assert len(logs[0]) == NUM_EPOCHS * 6
    torch.testing.assert_close(torch.tensor(logs[0]), torch.tensor(logs[1]))


def accumulation_and_clipping() -> None:
    """Three batches per step, the mean clipped."""
    settings = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}
    same_numbers(fit(**settings), alone(every=3, max_norm=0.3))
    same_bits(fit(**settings), plain(every=3, max_norm=0.3))


def resume() -> None:
    """From the Trainer's checkpoint: the bits of a run without a break."""
    for settings in ({"codec": "1bit"}, {"schedule": "double_buffering"}, {}):
        options = {"save_strategy": "steps", "save_steps": 8, "num_train_epochs": 4}
        whole = fit(ExchangeOptions(**settings, **FLAT), num_train_epochs=4)
        first = trainer(ExchangeOptions(**settings, **FLAT), **options)
        first.add_callback(StopAt(8))
        first.train()
        checkpoint = Path(first.args.output_dir) / "checkpoint-8"
        second = trainer(ExchangeOptions(**settings, **FLAT), **options)
        second.train(resume_from_checkpoint=str(checkpoint))
        assert second.state.global_step == 24
        same_bits(whole, second.model.net)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def best_model_is_kept() -> None:
    """A mean or a block that is pending at the end is not applied to it."""
    for schedule in ("double_buffering", "diloco"):
        own = trainer(
            ExchangeOptions(schedule=schedule, **FLAT),
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=4,
            save_steps=4,
            load_best_model_at_end=True,
            metric_for_best_model="number",  # of samples, so that the first one is the best
            max_steps=11,
        )
        own.train()
        assert own.state.best_model_checkpoint.endswith("checkpoint-4")
        [file] = Path(own.state.best_model_checkpoint).glob("model.safetensors")
        saved = load_file(file)
        for name, tensor in own.model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name


def trains_again() -> None:
    """With the optimizer of the first time, as in one process."""
    own = trainer(num_train_epochs=1)
    own.train()
    own.train()
    assert len(own.exchange.optimizers) == 1
    same_numbers(own.model.net, alone())


def language_model() -> None:
    """The loss is a mean over tokens of all ranks, of which they have unequal numbers."""
    set_seed(1)
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(24):
        tokens = torch.randint(1, 40, (12,), generator=generator)
        labels = tokens.clone()
        labels[0], labels[2 + index % 10 :] = -100, -100  # the Trainer counts the first one, too
        rows.append({"input_ids": tokens, "labels": labels})
    config = GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    trained = []
    start = GPT2LMHeadModel(config).double().state_dict()
    for is_attached in (True, False):
        model = GPT2LMHeadModel(config).double()
        model.load_state_dict(start)
        own = InOrder(
            model,
            TrainingArguments(
                output_dir=str(folder()),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                num_train_epochs=2,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            optimizers=(sgd(model.parameters()), None),
        )
        if is_attached:
            attach(own, ExchangeOptions(**FLAT))
        own.train()
        trained.append(own.accelerator.unwrap_model(own.model))
    same_numbers(*trained, 1e-6)  # the loss is computed in float32
    alone = GPT2LMHeadModel(config).double()
    alone.load_state_dict(start)
    optimizer = sgd(alone.parameters())
    for _ in range(2):
        for first in range(0, 24, 8):
            tokens, labels = (
                torch.stack([row[key] for row in rows[first : first + 8]])
                for key in ("input_ids", "labels")
            )
            optimizer.zero_grad()
            alone(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
    same_numbers(trained[0], alone, 1e-6)


CHECKS: list[Callable[[], None]] = [
    as_ddp,
    accumulation_and_clipping,
    resume,
    best_model_is_kept,
    trains_again,
    language_model,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_checks({check.__name__: check for check in CHECKS})
