"""Wrong parameter servers, by the contract that must catch each."""

from torchmn.exchange.schedules import ParameterServer
from torchmn.exchange.schedules.parameter_server.server import ShardServer


def _with(server_class):
    return type(f"With{server_class.__name__}", (ParameterServer,), {"_server_class": server_class})


class _LosesAPush(ShardServer):
    def push(self, worker, stay, *, update, **options):
        update = None if self._workers[worker].clock == 2 else update
        return super().push(worker, stay, update=update, **options)


class _StepsTwice(ShardServer):
    def _apply(self, *arguments):
        super()._apply(*arguments)
        super()._apply(*arguments)


class _IgnoresTheBound(ShardServer):
    def _slowest(self):
        return 1000


class _AddsNoise(ShardServer):
    def _apply(self, *arguments):
        super()._apply(*arguments)
        for buffer in self._values.buffers:
            buffer += 1e-12


class _ForgetsStateWhenItBegins(ShardServer):
    def _begin(self, episode):
        super()._begin(episode)
        self._optimizer.state.clear()


LosesAPush = _with(_LosesAPush)
"""Of each worker the third."""
StepsTwice = _with(_StepsTwice)
"""Applies every push once more."""
IgnoresTheBound = _with(_IgnoresTheBound)
"""Lets all workers continue at once."""
AddsNoise = _with(_AddsNoise)
"""Changes parameters without a gradient."""
ForgetsStateWhenItBegins = _with(_ForgetsStateWhenItBegins)
"""Does not take over what was loaded."""


class KeepsItsOwn(ParameterServer):
    """Continues with the parameters of its last pull after a flush."""

    def flush(self):
        before = [p.detach().clone() for _, _, p, _ in self._places]
        super().flush()
        if self._comm.rank == 0:
            for (_, _, parameter, _), old in zip(self._places, before, strict=True):
                parameter.detach().copy_(old)


class LeavesStateAtServers(ParameterServer):
    """Does not gather the optimizer's state."""

    def _gather_state(self):
        pass


class PushesWhatIsNotFinite(ParameterServer):
    """Checks no gradient."""

    def _act_on(self, nonfinite):
        nonfinite.clear()
        super()._act_on(nonfinite)
