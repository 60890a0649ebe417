"""Loops of many kinds, whose steps are recorded; the arguments name those to run."""

import os
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchmn

NUM_STEPS = 6
torch.manual_seed(0)


def model() -> torch.nn.Sequential:
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    return torch.nn.Sequential(*layers)


def loader(num_batches: int = NUM_STEPS) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(8 * num_batches, 64)), batch_size=8)


def loop(comm: torchmn.Communicator, schedule: str, codec: str | None, **options: object) -> None:
    net = model()
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(net.parameters(), 0.01),
        comm,
        net,
        schedule=schedule,
        codec=codec,
        **options,
    )
    for (x,) in loader():
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    optimizer.flush()
    optimizer.close()


def schedules(comm: torchmn.Communicator) -> None:
    loop(comm, "every_step", None)
    loop(comm, "every_step", "int8")
    loop(comm, "double_buffering", None)
    loop(comm, "parameter_server", None)
    loop(comm, torchmn.schedules.PeriodicAverage(block_size=32 * comm.size), None)


def uneven(comm: torchmn.Communicator) -> None:
    net = model()
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(net.parameters(), 0.01), comm, net
    )
    with optimizer.join():
        for (x,) in loader(NUM_STEPS if comm.rank == 0 else 2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    optimizer.close()


def trainer(comm: torchmn.Communicator) -> None:
    from pytorch_pfn_extras.reporting import report
    from pytorch_pfn_extras.training.extensions import Evaluator

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        report({"accuracy": 0.5}, net)
        return net(x).square().mean()

    net = model()
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(net.parameters(), 0.01), comm, net
    )
    updater = torchmn.StandardUpdater(loader(), optimizer, net, loss_func=loss_of, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        train = torchmn.Trainer(updater, (1, "epoch"), out=folder, comm=comm)
        evaluator = Evaluator(loader(2), net, eval_func=lambda x: net(x))
        train.extend(torchmn.create_multi_node_evaluator(evaluator, comm), trigger=(2, "iteration"))
        checkpointer = torchmn.create_multi_node_checkpointer(
            comm, os.path.join(comm.bcast_obj(folder), "checkpoints"), "run"
        )
        train.extend(checkpointer, trigger=(3, "iteration"))
        train.extend(torchmn.train.LogReport(comm, trigger=(2, "iteration")))
        train.run()
        comm.barrier()
    optimizer.close()


def two_optimizers(comm: torchmn.Communicator) -> None:
    nets = model(), model()
    first, second = (
        torchmn.create_multi_node_optimizer(torch.optim.SGD(net.parameters(), 0.01), comm, net)
        for net in nets
    )
    for (x,) in loader():
        for net, optimizer in zip(nets, (first, second), strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    first.close()
    second.close()


def fails(comm: torchmn.Communicator) -> None:
    loop(comm, "every_step", None)
    raise ValueError("after the last step")


def endless(comm: torchmn.Communicator) -> None:
    net = model()
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(net.parameters(), 0.01), comm, net
    )
    while True:
        optimizer.zero_grad()
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


def ddp(comm: torchmn.Communicator) -> None:
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(model())
    torchmn.ddp_hook("int8", comm=comm).register(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for (x,) in loader():
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    world = torchmn.create_communicator("flat")
    for kind in sys.argv[1:]:
        torchmn.record.report_value(f"begins {kind}", 0)
        globals()[kind](world)
