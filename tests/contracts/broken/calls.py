"""Communicators whose calls are wrong, by the contract of calls that must catch each."""

from __future__ import annotations

from torchmn.communicators.collective_checks import Call
from torchmn.communicators.flat import FlatCommunicator
from torchmn.communicators.point_to_point import ANY_TAG


class ComparesNothing(FlatCommunicator):
    """Every rank believes that the others do the same, as MPI does."""

    def _open_collectives(self, trust, device):
        super()._open_collectives(trust, device)
        meet = self._check.compare
        self._check.compare = lambda call, *rest: meet(Call("something"), *rest)


class ComparesNamesOnly(FlatCommunicator):
    """Does not look at op, root, dtype and shapes, as in the first versions of reduce_scatter."""

    def _open_collectives(self, trust, device):
        super()._open_collectives(trust, device)
        meet = self._check.compare
        self._check.compare = lambda call, *rest: meet(Call(call.name), *rest)


class KeepsItsErrorToItself(FlatCommunicator):
    """Raises for a wrong argument at once and lets the others wait."""

    def _job(self, name, prepare):
        return prepare()


class TakesTheInputLater(FlatCommunicator):
    """Reads what is to be summed when its turn comes."""

    def start_allreduce(self, x, op="sum", **factors):
        return self.engine.submit(lambda: self._allreduce_job(x, op, 1.0, 1.0)())


class ForgetsToScale(FlatCommunicator):
    """Ignores the factor behind the reduction."""

    def _allreduce_job(self, x, op, prescale_factor, postscale_factor):
        return super()._allreduce_job(x, op, prescale_factor, 1.0)


class TakesWhateverComes(FlatCommunicator):
    """Gives the next message of a rank, whatever its tag."""

    def recv_obj(self, source, tag=0, status=None):
        return super().recv_obj(source, ANY_TAG, status)


class SortsTheRanks(FlatCommunicator):
    """Orders a subgroup by rank."""

    def subgroup(self, ranks):
        return super().subgroup(sorted(ranks))
