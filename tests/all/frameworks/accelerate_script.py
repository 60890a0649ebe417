"""Run on two ranks by test_checks.py: each check says "ok" or why not."""

from __future__ import annotations

import gc
import tempfile
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests.all.frameworks.task import (
    BATCH,
    NUM_EPOCHS,
    Net,
    in_blocks,
    raises,
    run_checks,
    same_bits,
    same_numbers,
    same_on_all,
    samples,
    sgd,
    train,
)
from torchmn.errors import UsageError
from torchmn.train.frameworks import ExchangeOptions, attach

comm = torchmn.create_communicator("flat", timeout_s=60)
FLAT = {"communicator": "flat", "timeout_s": 60}


def attached(options: ExchangeOptions | None = None, **settings: Any) -> Accelerator:
    own = Accelerator(cpu=True, **settings)
    assert own.num_processes == 2
    return attach(own, options or ExchangeOptions(**FLAT))


def loop(
    accelerator: Accelerator, *, max_norm: float | None = None, num_epochs: int = NUM_EPOCHS
) -> nn.Module:
    """As Accelerate's documentation shows it."""
    net = Net()
    optimizer = sgd(net.parameters())
    data = DataLoader(TensorDataset(*samples()), batch_size=BATCH // 2)
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    for _ in range(num_epochs):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.flush()
    return accelerator.unwrap_model(model)


def plain(**settings: Any) -> nn.Module:
    return train(in_blocks(comm.rank, 2), comm=comm, **settings)


def alone(**settings: Any) -> nn.Module:
    return train(in_blocks(0, 1), **settings)


def accumulation_and_clipping() -> None:
    """Over four batches; the last two of an epoch make a step of their own."""
    accelerator = attached(gradient_accumulation_steps=4)
    same_numbers(loop(accelerator, max_norm=0.3), alone(every=4, max_norm=0.3))
    same_bits(
        loop(attached(gradient_accumulation_steps=4), max_norm=0.3), plain(every=4, max_norm=0.3)
    )


def accumulation_is_local() -> None:
    """Passes that do not end a step exchange nothing."""
    accelerator = attached(gradient_accumulation_steps=4)
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    inputs, targets = samples()
    for step in range(3):
        batch = in_blocks(comm.rank, 2)[step]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs[batch]), targets[batch]))
            optimizer.step()
            optimizer.zero_grad()
    norms = comm.allgather_obj(float(net[0].weight.grad.norm()))
    assert norms[0] != norms[1]


def codecs_and_schedules() -> None:
    for settings in (
        {"codec": "int8"},
        {"schedule": "diloco"},
    ):
        net = loop(attached(ExchangeOptions(**settings, **FLAT)), num_epochs=6)
        same_bits(net, plain(**settings, num_epochs=6))
        same_on_all(comm, net)


def loss_scaling() -> None:
    """A GradScaler, as Accelerate makes one for fp16 on GPUs; unscaled before the norm, once."""
    accelerator = attached()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = Net()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))  # stays in float64
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    try:
        inputs, targets = samples()
        for _ in range(NUM_EPOCHS):
            for batch in in_blocks(comm.rank, 2):
                accelerator.backward(nn.functional.mse_loss(model(inputs[batch]), targets[batch]))
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                assert not optimizer.step_was_skipped
                optimizer.zero_grad()
    finally:
        accelerator.state._mixed_precision = "no"
    same_numbers(net, alone(max_norm=0.3))


def uneven_ends() -> None:
    """44 samples: the second rank has no last batch, and leaves the loop one step earlier."""
    inputs, targets = (each[:44] for each in samples())
    accelerator = attached()
    net = Net()
    data = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH // 2)
    model, optimizer, data = accelerator.prepare(net, sgd(net.parameters()), data)
    num_steps = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            num_steps += 1
    assert comm.allgather_obj(num_steps) == [6, 5]
    assert data.batch_sampler.even_batches
    same_on_all(comm, net)
    reference = Net()
    own = sgd(reference.parameters())
    for start in range(0, 44, BATCH):
        own.zero_grad()
        part = slice(start, min(start + BATCH, 44))
        nn.functional.mse_loss(reference(inputs[part]), targets[part]).backward()
        own.step()
    same_numbers(net, reference)


def resume() -> None:
    """From Accelerate's checkpoint, which rank 0 writes: the bits of a run without a break."""
    folder = Path(comm.bcast_obj(tempfile.mkdtemp() if comm.rank == 0 else None))
    inputs, targets = samples()
    for settings in ({"codec": "1bit"}, {"schedule": "double_buffering"}, {"codec": "float16"}):
        accelerator = attached(ExchangeOptions(**settings, **FLAT))

        def steps(first: int, last: int, parts: tuple[Any, Any]) -> None:
            model, optimizer = parts
            for step in range(first, last):
                batch = in_blocks(comm.rank, 2)[step % 6]
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
                accelerator.backward(loss)  # noqa: B023
                optimizer.step()

        whole = Net()
        parts = accelerator.prepare(whole, sgd(whole.parameters()))
        steps(0, 4, parts)
        accelerator.save_state(str(folder / "state"), safe_serialization=False)
        steps(4, 10, parts)
        accelerator = attached(ExchangeOptions(**settings, **FLAT))
        again = Net()
        parts = accelerator.prepare(again, sgd(again.parameters()))
        accelerator.load_state(str(folder / "state"))
        steps(4, 10, parts)
        same_bits(whole, again)


def optimizer_before_its_model() -> None:
    """Prepared one by one, in any order."""
    accelerator = attached()
    net = Net()
    optimizer = accelerator.prepare(sgd(net.parameters()))
    data = accelerator.prepare(DataLoader(TensorDataset(*samples()), batch_size=BATCH // 2))
    model = accelerator.prepare(net)
    assert not isinstance(model, DistributedDataParallel)
    for _ in range(NUM_EPOCHS):
        for inputs, targets in data:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    same_numbers(net, alone())


def scheduler() -> None:
    """Accelerate steps it once per rank, as without torchmn."""
    rates = []
    for accelerator in (attached(), Accelerator(cpu=True)):
        net = Net()
        optimizer = sgd(net.parameters())
        own = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        model, optimizer, own = accelerator.prepare(net, optimizer, own)
        for batch in in_blocks(comm.rank, 2):
            optimizer.zero_grad()
            accelerator.backward(model(samples()[0][batch]).sum())
            optimizer.step()
            own.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:6] == rates[6:]
    assert len(set(rates)) > 2


def freed_models() -> None:
    """One after another with one Accelerator: nothing keeps them; one that is kept trains on."""
    accelerator = attached()
    freed = []
    for _ in range(2):
        net = loop(accelerator)
        same_numbers(net, alone())
        freed.append(weakref.ref(net))
        del net
        accelerator.free_memory()
    gc.collect()
    assert [net() for net in freed] == [None, None]
    net = Net()
    data = DataLoader(TensorDataset(*samples()), batch_size=BATCH // 2)
    model, optimizer, data = accelerator.prepare(net, sgd(net.parameters()), data)
    for _ in range(NUM_EPOCHS):
        for inputs, targets in data:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
        accelerator.free_memory()
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        assert len(accelerator.exchange.optimizers) == 1
    same_numbers(net, alone())


def refusals() -> None:
    accelerator = attached()
    net = Net()
    optimizer = accelerator.prepare(sgd(net.parameters()))
    raises(
        UsageError,
        "4 of 4 parameters of SGD are in no model",
        lambda: accelerator.backward(net(samples()[0]).sum()),
    )
    del optimizer
    accelerator = attached()
    net, scale = Net(), nn.Parameter(torch.ones(1))
    model, _ = accelerator.prepare(net, sgd([*net.parameters(), scale]))
    raises(
        UsageError,
        "(the first has the shape (1,))",
        lambda: accelerator.backward((model(samples()[0]) * scale).sum()),
    )
    accelerator = attached()
    net = Net()
    model = accelerator.prepare(net)
    raises(
        UsageError,
        "each rank would train",
        lambda: accelerator.backward(model(samples()[0]).sum()),
    )
    divided = [
        torchmn.scatter_loader(DataLoader(range(8), batch_size=4), comm),
        DataLoader(range(8), batch_sampler=torchmn.GlobalSampler(8, comm, 4)),
        DataLoader(torchmn.scatter_dataset(range(8), comm), batch_size=2),
    ]
    for loader in divided:
        prepare = partial(accelerator.prepare, loader)
        raises(UsageError, "its part of the data already", prepare)
    raises(UsageError, "or twice", lambda: attach(accelerator))
    raises(UsageError, "for an accelerate.Accelerator", lambda: attach(net))
    used = Accelerator(cpu=True)
    used.prepare(Net())
    raises(UsageError, "after accelerator.prepare()", lambda: attach(used))


CHECKS: list[Callable[[], None]] = [
    accumulation_and_clipping,
    accumulation_is_local,
    codecs_and_schedules,
    loss_scaling,
    uneven_ends,
    resume,
    optimizer_before_its_model,
    scheduler,
    freed_models,
    refusals,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_checks({check.__name__: check for check in CHECKS})
