"""Asynchronous training: workers push gradients to servers and pull parameters independently.

    worker i, step t:   g = gradient of its own batch at w_i
                        push g to all servers; each applies it at once:  w <- update(w, g)
                        pull w_i <- w, when at most s steps ahead of the slowest live worker

Servers are threads of the ranks: every rank owns a shard of the parameters and of the optimizer
state (``servers="all"``), or only the last k ranks do, and do not train (``servers=k``).

Sources: bounded staleness: Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013; servers: M. Li et al., OSDI 2014. CNTK's DataParallelASGD
over Multiverso differs: its workers updated locally and pushed differences of models, with no bound
on staleness, no momentum at the servers, and its own learning rate schedule. Here gradients are
pushed, each push is one update by the user's optimizer at the server, with the worker's
hyper-parameters at that step; a shard holds whole parameters.
"""

import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torchmn.base import events
from torchmn.base.errors import PeerLostError, UnsupportedError, UsageError
from torchmn.base.torch_private import STEP_HOOKS
from torchmn.base.warn import warn
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.finiteness import NonfiniteGradients
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.schedules.base import Schedule, Traits
from torchmn.exchange.schedules.changed_parameters import ParameterSample
from torchmn.exchange.schedules.parameter_server.messages import (
    Messages,
    ServerClient,
    WorkerThread,
)
from torchmn.exchange.schedules.parameter_server.server import Reply, ShardServer, Update
from torchmn.exchange.schedules.parameter_server.shards import (
    ShardMemory,
    assign_shards,
    device_copy,
    hyper_parameters,
)

_GRACE_S = 2.0


class Staleness(NamedTuple):
    """By how many updates the gradients of a worker were late.

    The number of updates, including its own, between the pull of the parameters at which a gradient
    was computed and its push; the largest one over all servers.
    """

    mean: float
    max: int


class ParameterServer(Schedule):
    """The schedule ``parameter_server``: servers own the parameters, workers train asynchronously.

    Args:
        servers: ``"all"``: all ranks serve and train; a number: the last ``servers`` ranks serve
            and do not train.
        max_staleness: no worker begins a step more than this many steps ahead of the slowest live
            one. 0 is synchronous, though updates are applied one after another.

    Raises UsageError: an argument is out of range.

    Example:
        >>> ParameterServer(max_staleness=4).name
        'parameter_server'
    """

    # No p.grad is stale: it is the rank's own. `staleness` tells how old the parameters are.
    traits = Traits(
        name="parameter_server",
        num_sets=0,
        averages_gradients=False,
        has_own_steps=True,
        replica_consistency="none",
    )
    _server_class: type[ShardServer] = ShardServer

    def __init__(self, servers: int | Literal["all"] = "all", *, max_staleness: int = 4) -> None:
        if servers != "all" and (not isinstance(servers, int) or servers < 1):
            raise UsageError(f"servers={servers!r} must be 'all' or a positive number of ranks.")
        if max_staleness < 0:
            raise UsageError(f"max_staleness={max_staleness} must not be negative.")
        self.servers = servers
        self.max_staleness = max_staleness
        self.lost: set[int] = set()
        """Ranks that died or left early; training continued without them."""
        self._num_steps = self._sum_late = self._max_late = 0
        self._episode = 0
        self._is_open = False
        self._is_closed = False
        self._server: ShardServer | None = None
        self._threads: list[WorkerThread] = []

    def staleness(self) -> Staleness:
        """The staleness of this worker's gradients so far. Local."""
        return Staleness(self._sum_late / max(1, self._num_steps), self._max_late)

    # ---- life ----

    def attach(
        self, reducer: GradientReducer, inner: Optimizer, models: Sequence[nn.Module]
    ) -> None:
        """See `Schedule.attach`. Raises UnsupportedError: see `_raise_if_unsupported`."""
        super().attach(reducer, inner, models)
        comm = self._comm
        self._raise_if_unsupported()
        num_servers = comm.size if self.servers == "all" else self.servers
        servers = list(range(comm.size - num_servers, comm.size))
        serves = self.servers != "all" and comm.rank in servers
        self.traits = replace(self.traits, serves=serves)
        self._parameters = list(reducer.parameters.trained())
        shards = dict(zip(servers, assign_shards(self._parameters, num_servers), strict=True))
        self._memory = {server: ShardMemory(shard) for server, shard in shards.items()}
        self._places: list[tuple[int, str, nn.Parameter, Tensor]] = [
            (server, name, parameter, self._memory[server].slots[name])
            for server, shard in shards.items()
            for name, parameter in shard
        ]
        self._known = ParameterSample(self._parameters)
        # A transport of its own: servers and workers send at any time, from several threads, while
        # the collectives of the communicator keep one order.
        transport = comm.groups.new_transport("servers")
        self._messages = Messages(transport, comm.timeout_s, comm.trust)
        if comm.rank in servers:
            self._start_server(shards[comm.rank])
        self._client = ServerClient(
            self._messages, servers, self._server, comm.rank, comm.rank_label
        )
        self._forget_close = comm.on_finalize(self.close)
        # At exit the threads must end before the interpreter does, and before MPI is finalized.
        atexit.register(self.close)

    def _start_server(self, shard: list[NamedParameter]) -> None:
        comm = self._comm
        self._server = self._server_class(
            comm.rank,
            shard,
            self._inner,
            comm.size,
            max_staleness=self.max_staleness,
            timeout_s=comm.timeout_s,
        )
        self._threads = [
            WorkerThread(self._server, worker, self._messages)
            for worker in range(comm.size)
            if worker != comm.rank
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Disconnect from all servers and stop this rank's own. Local; may be called again.

        Waits up to two seconds for the other ranks to disconnect as well.
        """
        if self._is_closed:
            return
        self._is_closed, groups = True, self._comm.groups
        atexit.unregister(self.close)
        self._forget_close()
        # An error may have ended the loop while a request still waits for its responses: another
        # message to the same server would mix with it.
        is_stuck = self._client.is_waiting
        if not is_stuck:
            self._client.leave()
        if self._server is not None:
            self._server.close(
                PeerLostError(
                    f"{self._comm.rank_label} has ended its training. Its part of the parameters "
                    "is not available to the others: end the training on all ranks with flush() "
                    "or optimizer.join()."
                )
            )
        threads = [*self._threads, *self._client.threads]
        _join_all(threads, 0.0 if is_stuck else _GRACE_S)
        transport = self._messages.transport
        if any(thread.is_alive() for thread in threads):
            self._messages.end()
            # A thread that returns from a wait in C++ while the interpreter exits would kill the
            # process by a signal. Now that their receives have ended, all of them return.
            _join_all(threads, 5 * _GRACE_S)
        if not any(thread.is_alive() for thread in threads):
            groups.close_transport(transport)

    # ---- a step ----

    def backward_ended(self) -> None:
        """See `Schedule.backward_ended`: gradients stay this rank's own until `step`."""

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """See `Schedule.step`. Local, except that it waits if this worker is too far ahead.

        Hooks of the inner optimizer's step are called here, around the push. A gradient that is
        not finite is never sent to the servers, whatever ``on_nonfinite`` is. Raises UsageError:
        the script has changed parameters since the last step, which servers would not notice.
        """
        if not self._reducer.is_active:  # it has left its loop, or only serves
            self.flush()
            self._exchange.num_active = 0
            return None
        self._raise_if_misused(closure)
        self._raise_if_changed()
        nonfinite = [name for _, name, p, _ in self._places if not _is_finite(p.grad)]
        self._act_on(nonfinite)
        updates = {} if nonfinite else self._pack()
        self._open()
        requests = {
            server: {"episode": self._episode, "update": updates.get(server)}
            for server in self._memory
        }
        with events.during("exchange"):
            replies: dict[int, Reply] = self._client.request("push", requests)
        self._install(replies)
        num_late = max(reply.num_updates_late for reply in replies.values())
        self._num_steps, self._sum_late = self._num_steps + 1, self._sum_late + num_late
        self._max_late = max(self._max_late, num_late)
        self._call_hooks(STEP_HOOKS[1])
        return None

    def _pack(self) -> dict[int, Update]:
        """Copy the gradients; return what is pushed to each server."""
        absent: dict[int, list[str]] = {server: [] for server in self._memory}
        for server, name, parameter, slot in self._places:
            grad = parameter.grad
            if grad is None:
                slot.zero_()
                if not (self._exchange.zero_fill and parameter.requires_grad):
                    absent[server].append(name)
            elif grad.layout != torch.strided:
                raise UnsupportedError(
                    f"{self._comm.rank_label}: the gradient of '{name}' is sparse ({grad.layout}). "
                    "Only dense gradients are pushed: make the layer with sparse=False."
                )
            else:
                slot.copy_(grad.detach())
        hyper = hyper_parameters(self._inner)
        return {
            server: Update(gradients=memory.buffers, absent=absent[server], hyper=hyper)
            for server, memory in self._memory.items()
        }

    def _install(self, replies: Mapping[int, Reply]) -> None:
        """Copy the pulled values into the parameters."""
        for server, reply in replies.items():
            self._memory[server].fill(reply.parameters)
        with torch.no_grad():
            for _, _, parameter, slot in self._places:
                parameter.copy_(slot)
        self._known.note()
        lost = {worker for reply in replies.values() for worker in reply.lost} - self.lost
        if lost:
            self.lost |= lost
            warn(
                f"{self._comm.rank_label}: rank {', '.join(map(str, sorted(lost)))} is lost. "
                "Training continues without it.",
            )

    def _raise_if_changed(self) -> None:
        """Raise UsageError if the script has changed parameters since they were pulled. Local."""
        if not self._is_open:
            return
        changed = self._known.changed()
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UsageError(
                f"{self._comm.rank_label}: the script has changed '{changed[0]}'{more} since the "
                "last step. Under parameter_server the servers hold the parameters, and the change "
                "would be lost. Call optimizer.flush() on all ranks first, then change parameters: "
                "the next step begins with them. What every step does to parameters belongs into "
                "the step() of a subclass of your optimizer, which runs at the servers."
            )

    def _open(self) -> None:
        """Begin an episode: this rank's server may copy model and optimizer. Local."""
        if self._is_open:
            return
        self._is_open = True
        self._known.note()

    # ---- the end of an episode ----

    def flush(self) -> None:
        """See `Schedule.flush`: wait until all workers call it, and pull the final parameters.

        All ranks then hold the same parameters and the whole optimizer state.
        """
        self._raise_if_changed()
        self._open()
        episode = dict.fromkeys(self._memory, {"episode": self._episode})
        self._install(self._client.request("finish", episode))
        self._gather_state()
        self._client.request("confirm", episode)
        self._episode += 1
        self._is_open = False

    def _gather_state(self) -> None:
        """Copy the state of the optimizer from the servers into the inner one."""
        gathered = self._client.request("state", dict.fromkeys(self._memory, {}))
        states = self._inner.state
        for server, name, parameter, _ in self._places:
            state = gathered[server].get(name)
            states.pop(parameter, None)
            if state is not None:
                states[parameter] = device_copy(state, parameter)

    def rebuild(self) -> None:
        """Raises UnsupportedError: parameters cannot be added, because servers own them."""
        raise UnsupportedError(
            f"{self._comm.rank_label}: parameters were added to the optimizer, but the servers "
            "were started without them. Call flush() and close(), and make a new optimizer."
        )

    def state_dict(self) -> dict[str, Any]:
        """See `Schedule.state_dict`. Copies the servers' current state into the inner optimizer.

        Servers continue meanwhile; after `flush` the state and the model are consistent.
        """
        if self._is_open:
            self._gather_state()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Schedule.load_state_dict`; servers copy the model and the state at the next step."""
        self._episode += 1
        self._is_open = False

    # ---- inside ----

    def _act_on(self, nonfinite: list[str]) -> None:
        """Record nonfinite gradients, and call the hooks before a step.

        One of these is ours, which raises or warns as ``on_nonfinite`` says.
        """
        problem, nonfinite_log = None, self._exchange.nonfinite
        if nonfinite:
            problem = NonfiniteGradients(self._reducer.step, {self._comm.rank: nonfinite})
        nonfinite_log.record(problem)
        self._call_hooks(STEP_HOOKS[0])

    def _call_hooks(self, which: str) -> None:
        """Call hooks of the inner optimizer's step, as a worker does not call that step itself."""
        for hook in [*getattr(self._inner, which).values()]:
            hook(self._inner, (), {})

    def _raise_if_unsupported(self) -> None:
        comm, reducer = self._comm, self._reducer
        if isinstance(self._inner, LBFGS):
            raise UnsupportedError(
                "parameter_server does not support LBFGS, which couples all parameters: each "
                "server has only some. Use an optimizer that updates each parameter independently."
            )
        if self.servers != "all" and self.servers >= comm.size:
            raise UnsupportedError(
                f"servers={self.servers} of {comm.size} ranks leave none to train. Use fewer, or "
                "servers='all'."
            )
        if reducer.codec is not None:
            raise UnsupportedError(
                f"parameter_server has no codec, and {reducer.codec.name} is given: parameters are "
                "pulled as they are, so that encoded gradients would save less than half. Leave "
                "codec= (or allreduce_grad_dtype=) out, or use another schedule."
            )
        if reducer.parameters.are_sharded:
            raise UnsupportedError(
                f"{comm.rank_label}: parameter_server updates parameters on other ranks, and those "
                "of this model are sharded (DTensors), of which each rank holds a part. Use "
                "'every_step', 'double_buffering' or a schedule of blocks, such as 'diloco'."
            )
        if comm.name == "pure_nccl":
            raise UnsupportedError(
                "parameter_server goes through host memory, over gloo or MPI, and pure_nccl uses "
                "neither. Use 'flat' or 'hierarchical', also for GPUs."
            )

    def _raise_if_misused(self, closure: Callable[[], float] | None) -> None:
        rank_label = self._comm.rank_label
        if self.traits.serves:
            raise UsageError(
                f"{rank_label}: this rank only serves (servers={self.servers}) and does not "
                "train: call optimizer.serve() instead of the training loop."
            )
        if closure is not None:
            raise UnsupportedError(
                f"{rank_label}: parameter_server does not support step(closure): workers do not "
                "step together. Compute loss and gradients before step()."
            )
        if self._contribution.weight != 1.0:
            raise UnsupportedError(
                f"{rank_label}: parameter_server does not support weights: each worker's gradient "
                "is a separate update. Use weight='rank' and scale the loss instead."
            )


def _join_all(threads: Sequence[threading.Thread], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _is_finite(grad: Tensor | None) -> bool:
    if grad is None or grad.layout != torch.strided:
        return True
    # The sum first: it is one pass without memory, and finite if nothing is wrong.
    return bool(torch.isfinite(grad.sum())) or bool(torch.isfinite(grad).all())
