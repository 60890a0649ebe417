"""Wrong differentiable functions, by the contract that must catch each."""

from types import SimpleNamespace

import torch

import torchmn.nn.functions as right


def _changed(**functions):
    return SimpleNamespace(**{name: getattr(right, name) for name in right.__all__} | functions)


def _with_gradient(x, change):
    """The tensor, whose gradient is changed."""
    y = x * 1
    if y.requires_grad:
        y.register_hook(change)
    return y


def averages_the_gradients_of_a_broadcast():
    """The mean over ranks, as for parameters, and not the sum."""

    def bcast(comm, x, root=0):
        if comm.rank == root:
            x = _with_gradient(x, lambda g: g / comm.size)
        return right.bcast(comm, x, root)

    return _changed(bcast=bcast)


def promotes_16_bits():
    """Gathers in float32, as ChainerMN sent."""

    def allgather(comm, x):
        is_short = x.dtype in (torch.float16, torch.bfloat16)
        return right.allgather(comm, x.float() if is_short else x)

    return _changed(allgather=allgather)


def asks_only_the_own_rank():
    """Records a sum only where the own tensor requires a gradient."""

    def allreduce(comm, x, op="sum"):
        total = right.allreduce(comm, x, op)
        return total if x.requires_grad else total.detach()

    return _changed(allreduce=allreduce)


def answers_in_one_direction():
    """Returns no gradients to higher ranks."""

    def send(x, comm, rank, tag=0):
        return right.send(x.detach() if rank < comm.rank else x, comm, rank, tag)

    return _changed(send=send)


def takes_the_sum_for_the_mean():
    """The right mean, whose gradient is that of the sum."""

    def allreduce(comm, x, op="sum"):
        y = right.allreduce(comm, x, op)
        return y.detach() + comm.size * (y - y.detach()) if op == "mean" else y

    return _changed(allreduce=allreduce)


def halves_gradients():
    """Of what is sent."""

    def send(x, comm, rank, tag=0):
        return right.send(_with_gradient(x, lambda g: g / 2), comm, rank, tag)

    return _changed(send=send)


def loses_the_tuple():
    """A tuple of one becomes its tensor."""

    def recv(comm, rank, delegate_variable=None, tag=0, force_tuple=False):
        return right.recv(comm, rank, delegate_variable, tag)

    return _changed(recv=recv)


def cuts_the_second_derivative():
    """The right gradient, as a constant."""

    def allgather(comm, x):
        return right.allgather(comm, _with_gradient(x, lambda g: g.detach()))

    return _changed(allgather=allgather)


def runs_once():
    """A second backward pass gets nothing."""

    def allgather(comm, x):
        passes = []

        def first_only(grad):
            passes.append(1)
            return grad if len(passes) == 1 else grad * 0

        return right.allgather(comm, _with_gradient(x, first_only))

    return _changed(allgather=allgather)


def forgets_what_it_received():
    """A checkpointed function that runs again receives zeros."""

    def allreduce(comm, x, op="sum"):
        y = right.allreduce(comm, x, op)
        return y if torch._C._current_graph_task_id() == -1 else y * 0

    return _changed(allreduce=allreduce)


def casts_under_autocast():
    """A sum of float32 is a product of matrices for it."""

    def allreduce(comm, x, op="sum"):
        short = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
        return right.allreduce(comm, short, op)

    return _changed(allreduce=allreduce)


def keeps_graphs():
    """Every result stays, in case that backward comes."""
    kept = []

    def allreduce(comm, x, op="sum"):
        kept.append(x)
        return right.allreduce(comm, x, op)

    return _changed(allreduce=allreduce)
