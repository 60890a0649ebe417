"""Run on two ranks by test_checks.py: each check says "ok" or why not."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    TensorDataset,
)

import torchmn
from tests.all.frameworks.task import (
    BATCH,
    NUM_EPOCHS,
    Make,
    Net,
    raises,
    run_checks,
    same_bits,
    same_numbers,
    same_on_all,
    samples,
    sgd,
    strided,
    train,
    uneven,
)
from torchmn.errors import UnsupportedError, UsageError
from torchmn.train.frameworks import ExchangeOptions, fabric_strategy, lightning_strategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
comm = torchmn.create_communicator("flat", timeout_s=60)
FLAT = {"communicator": "flat", "timeout_s": 60}


class Module(lightning.LightningModule):
    def __init__(self, make: Make = sgd, *, is_direct: bool = False) -> None:
        super().__init__()
        self.net = Net()
        self.make = make
        self.is_direct = is_direct
        self.logged: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs) if self.is_direct else self(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        self.log("loss", loss, sync_dist=True, on_step=True, batch_size=len(inputs))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("val", loss, sync_dist=True, batch_size=len(inputs))

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches, for DataLoader(batch_size=None)."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = samples()
        return inputs[self.batches[index]], targets[self.batches[index]]


def loader(batches: list[list[int]]) -> DataLoader[Any]:
    return DataLoader(Batches(batches), batch_size=None)


def trainer(options: ExchangeOptions | None = None, **settings: Any) -> lightning.Trainer:
    strategy = settings.pop("strategy", None) or lightning_strategy(
        options or ExchangeOptions(**FLAT), process_group_backend="gloo"
    )
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(
        **{
            "max_epochs": NUM_EPOCHS,
            "accelerator": "cpu",
            "devices": 2,
            "strategy": strategy,
            "use_distributed_sampler": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **plain,
            **settings,
        }
    )


def fit(
    options: ExchangeOptions | None = None,
    *,
    make: Make = sgd,
    batches: list[list[int]] | None = None,
    is_direct: bool = False,
    **settings: Any,
) -> Module:
    module = Module(make, is_direct=is_direct)
    own = strided(comm.rank, 2) if batches is None else batches
    trainer(options, **settings).fit(module, loader(own))
    return module


def plain(**settings: Any) -> nn.Module:
    return train(strided(comm.rank, 2), comm=comm, **settings)


def alone(**settings: Any) -> nn.Module:
    return train(strided(0, 1), **settings)


def as_ddp() -> None:
    """Lightning's own strategy: the same numbers, and what is logged."""
    from lightning.pytorch.strategies import DDPStrategy

    ours = fit()
    theirs = fit(strategy=DDPStrategy(process_group_backend="gloo"))
    same_numbers(ours.net, theirs.net)
    assert len(ours.logged) == NUM_EPOCHS * 6
    torch.testing.assert_close(ours.logged, theirs.logged, rtol=1e-6, atol=0)
    assert len({*map(tuple, comm.allgather_obj(ours.logged))}) == 1, "ranks logged other means"


def accumulation_and_clipping() -> None:
    """Over four batches, of which an epoch leaves two over; of the mean, not of each rank."""
    for settings, options in (
        ({"accumulate_grad_batches": 4}, {"every": 4}),
        ({"gradient_clip_val": 0.3}, {"max_norm": 0.3}),
    ):
        module = fit(**settings)
        same_bits(module.net, plain(**options))
        same_numbers(module.net, alone(**options))


def uneven_batches() -> None:
    """Weighted by samples: also where training_step calls layers instead of the module."""
    for is_direct in (False, True):
        options = ExchangeOptions(weight="samples", **FLAT)
        module = fit(options, batches=uneven(comm.rank), is_direct=is_direct)
        same_numbers(module.net, alone())


class Manual(Module):
    """Two optimizers, stepped by hand; the second one accumulates over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return sgd(self.net[0].parameters()), sgd(self.net[2].parameters())

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        inputs, targets = batch
        first.zero_grad()
        if index % 2 == 0:
            second.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(inputs), targets))
        first.step()
        if index % 2:
            second.step()

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def manual_optimization() -> None:
    module = Manual()
    trainer().fit(module, loader(strided(comm.rank, 2)))
    net = Net()
    first, second = sgd(net[0].parameters()), sgd(net[2].parameters())
    inputs, targets = samples()
    for _ in range(NUM_EPOCHS):
        for index, batch in enumerate(strided(0, 1)):
            first.zero_grad()
            if index % 2 == 0:
                second.zero_grad()
            nn.functional.mse_loss(net(inputs[batch]), targets[batch]).backward()
            first.step()
            if index % 2:
                second.step()
    same_numbers(module.net, net)


def loss_scaling() -> None:
    """A GradScaler, with clipping: unscaled before the norm, once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = lambda: torch.enable_grad()  # numbers stay in float64
    module = fit(plugins=plugin, gradient_clip_val=0.3)
    same_numbers(module.net, alone(max_norm=0.3))


def exact_evaluation() -> None:
    """13 samples on two ranks in batches of 4: 4 + 3 and 4 + 2 of them, none twice."""
    inputs, targets = samples(13)
    module = Module()
    truth = float(nn.functional.mse_loss(module(inputs), targets))
    data = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    found = {}
    for is_exact in (True, False):
        strategy = lightning_strategy(
            ExchangeOptions(**FLAT), exact_evaluation=is_exact, process_group_backend="gloo"
        )
        own = trainer(strategy=strategy, use_distributed_sampler=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (result,) = own.validate(module, data, verbose=False)
        found[is_exact] = abs(result["val"] / truth - 1)
    assert found[True] < 1e-6, found
    assert found[False] > 1e-4, "a test of nothing"


class OwnBatchSampler(BatchSampler):
    pass


def exact_evaluation_with_own_batch_sampler() -> None:
    inputs, targets = samples(13)
    module, rows = Module(), TensorDataset(inputs, targets)
    data = DataLoader(rows, batch_sampler=OwnBatchSampler(SequentialSampler(rows), 4, False))
    (result,) = trainer(use_distributed_sampler=True).validate(module, data, verbose=False)
    truth = float(nn.functional.mse_loss(module(inputs), targets))
    assert abs(result["val"] / truth - 1) < 1e-6, (result, truth)
    scattered = torchmn.scatter_dataset(range(8), comm)
    part = DataLoader(
        scattered, batch_sampler=OwnBatchSampler(SequentialSampler(scattered), 2, False)
    )
    dividing = trainer(use_distributed_sampler=True)
    raises(UsageError, "once more", lambda: dividing.fit(Module(), part))


class LogsSteps(Module):
    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", batch[0].mean(), sync_dist=True, on_step=True, batch_size=len(batch[0]))


class Gathers(Module):
    def validation_step(self, batch: Any, index: int) -> None:
        self.all_gather(batch[0].mean())


def evaluation_that_communicates() -> None:
    """17 samples: two batches on rank 0, one on rank 1. Of 20 both have two."""
    for make in (LogsSteps, Gathers):
        few, even = (DataLoader(TensorDataset(*samples(n)), batch_size=8) for n in (17, 20))
        own = trainer(use_distributed_sampler=True)
        module = make()
        raises(
            UsageError,
            "exact_evaluation=False",
            lambda: own.validate(module, few, verbose=False),  # noqa: B023
        )
        trainer(use_distributed_sampler=True).validate(module, even, verbose=False)


class Normalized(Module):
    """With the running statistics of batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))


def running_statistics() -> None:
    """What is evaluated is what is saved: their means over ranks."""
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    data = DataLoader(TensorDataset(*samples(13)), batch_size=4)
    module, saving = Normalized(), Saver(folder / "a.ckpt")
    own = trainer(use_distributed_sampler=True, callbacks=[saving])
    own.fit(module, loader(strided(comm.rank, 2)), data)
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    assert len(set(comm.allgather_obj(float(buffers["net.1.running_mean"].sum())))) == 1
    saved = torch.load(saving.path)["state_dict"]
    for name, tensor in buffers.items():
        assert torch.equal(tensor, saved[name]), name
    logged = float(own.callback_metrics["val"])
    (result,) = trainer(use_distributed_sampler=True).validate(
        Normalized(), data, ckpt_path=saving.path, verbose=False
    )
    assert abs(result["val"] / logged - 1) < 1e-6, (result, logged)


def averaged_parameters_are_final() -> None:
    """A mean or a block that is pending is not applied to what a callback puts in their place."""
    data = DataLoader(TensorDataset(*samples(13)), batch_size=4)
    for schedule in ("double_buffering", "diloco"):
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        module = Module()
        own = trainer(
            ExchangeOptions(schedule=schedule, **FLAT), max_epochs=3, callbacks=[averaging]
        )
        own.fit(module, loader(strided(comm.rank, 2)), data)
        same_bits(module.net, averaging._average_model.net)


def resume() -> None:
    """From Lightning's checkpoint, which rank 0 writes: the bits of a run without a break."""
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    for options in ({"codec": "1bit"}, {"schedule": "double_buffering"}, {"codec": "float16"}):
        for every in (1, 2):
            whole = fit(
                ExchangeOptions(**options, **FLAT), max_epochs=4, accumulate_grad_batches=every
            )
            saving = Saver(folder / "middle.ckpt")  # in a run: fit() tears the strategy down
            fit(
                ExchangeOptions(**options, **FLAT),
                max_epochs=2,
                accumulate_grad_batches=every,
                callbacks=[saving],
            )
            again = Module()
            trainer(
                ExchangeOptions(**options, **FLAT), max_epochs=4, accumulate_grad_batches=every
            ).fit(again, loader(strided(comm.rank, 2)), ckpt_path=saving.path)
            same_bits(whole.net, again.net)


class Saver(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def local_updates_are_flushed() -> None:
    """What is saved and evaluated is what all ranks agreed on."""
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    saving = Saver(folder / "a.ckpt")
    module = Module()
    own = trainer(ExchangeOptions(schedule="diloco", **FLAT), callbacks=[saving])
    own.fit(module, loader(strided(comm.rank, 2)))
    saved = torch.load(folder / "a.ckpt")["state_dict"]
    assert torch.equal(saved["net.0.weight"], module.net[0].weight)
    same_on_all(comm, module)


def refusals() -> None:
    module = Module()
    module.net = DistributedDataParallel(module.net)
    raises(
        UsageError,
        "averaged again",
        lambda: trainer().fit(module, loader(strided(comm.rank, 2))),
    )
    raises(
        UnsupportedError,
        "parameter_server",
        lambda: fit(ExchangeOptions(schedule="parameter_server", **FLAT)),
    )
    part = DataLoader(torchmn.scatter_dataset(range(8), comm), batch_size=2)
    raises(UsageError, "once more", lambda: fabric().setup_dataloaders(part))
    assert len(fabric().setup_dataloaders(part, use_distributed_sampler=False)) == 2
    dividing = trainer(use_distributed_sampler=True)
    raises(UsageError, "once more", lambda: dividing.fit(Module(), part))
    whole = DataLoader(TensorDataset(*samples()), batch_size=BATCH)
    scattered = torchmn.scatter_loader(whole, comm)
    cure = "use_distributed_sampler=False"
    raises(UsageError, cure, lambda: fabric().setup_dataloaders(scattered))
    raises(UsageError, cure, lambda: dividing.fit(Module(), scattered))
    assert len(fabric().setup_dataloaders(scattered, use_distributed_sampler=False)) == 6


def fabric(options: ExchangeOptions | None = None) -> Any:
    strategy = fabric_strategy(options or ExchangeOptions(**FLAT), process_group_backend="gloo")
    made = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    made.launch()
    return made


def fabric_loop(
    own: Any, *, every: int = 1, max_norm: float | None = None, num_epochs: int = NUM_EPOCHS
) -> nn.Module:
    net = Net()
    model, optimizer = own.setup(net, sgd(net.parameters()))
    data = own.setup_dataloaders(loader(strided(comm.rank, 2)), use_distributed_sampler=False)
    for _ in range(num_epochs):
        for index, (inputs, targets) in enumerate(data):
            is_last = (index + 1) % every == 0
            with own.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(inputs), targets)
                own.backward(loss / every)
            if is_last:
                if max_norm is not None:
                    own.clip_gradients(model, optimizer, max_norm=max_norm)
                optimizer.step()
                optimizer.zero_grad()
    own.strategy.flush()
    return net


def fabric_as_one_process() -> None:
    same_bits(fabric_loop(fabric()), plain())
    same_numbers(fabric_loop(fabric()), alone())
    same_numbers(fabric_loop(fabric(), every=3, max_norm=0.3), alone(every=3, max_norm=0.3))
    options = ExchangeOptions(codec="1bit", **FLAT)
    same_bits(fabric_loop(fabric(options)), plain(codec="1bit"))


def fabric_collectives() -> None:
    own = fabric()
    mean = own.all_reduce(torch.tensor(float(comm.rank)), reduce_op="mean")
    assert float(mean) == 0.5
    assert float(own.all_reduce(torch.tensor(float(comm.rank)), reduce_op="sum")) == 1
    assert own.all_gather(torch.tensor(comm.rank)).tolist() == [0, 1]
    own.barrier()


def fabric_checkpoint() -> None:
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    options = ExchangeOptions(codec="1bit", **FLAT)
    inputs, targets = samples()

    def steps(own: Any, model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            batch = strided(comm.rank, 2)[step % 6]
            optimizer.zero_grad()
            own.backward(nn.functional.mse_loss(model(inputs[batch]), targets[batch]))
            optimizer.step()

    own = fabric(options)
    whole = Net()
    model, optimizer = own.setup(whole, sgd(whole.parameters()))
    steps(own, model, optimizer, 0, 4)
    own.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    steps(own, model, optimizer, 4, 10)
    own = fabric(options)
    again = Net()
    model, optimizer = own.setup(again, sgd(again.parameters()))
    own.load(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    steps(own, model, optimizer, 4, 10)
    same_bits(whole, again)


def fabric_refusals() -> None:
    own = fabric()
    net = Net()
    model = own.setup_module(net)
    raises(UsageError, "Set both up together", lambda: own.setup_optimizers(sgd(net.parameters())))
    raises(UsageError, "each rank would train", lambda: own.backward(model(samples()[0]).sum()))


CHECKS: list[Callable[[], None]] = [
    as_ddp,
    accumulation_and_clipping,
    uneven_batches,
    manual_optimization,
    loss_scaling,
    exact_evaluation,
    exact_evaluation_with_own_batch_sampler,
    evaluation_that_communicates,
    running_statistics,
    averaged_parameters_are_final,
    resume,
    local_updates_are_flushed,
    refusals,
    fabric_as_one_process,
    fabric_collectives,
    fabric_checkpoint,
    fabric_refusals,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_checks({check.__name__: check for check in CHECKS})
