"""Communicators whose calls are wrong, by the contract of calls that must catch each."""

from torchmn.comm import Communicator
from torchmn.comm.collective_checks import Call
from torchmn.comm.point_to_point import ANY_TAG


class ComparesNothing(Communicator):
    """Assumes that all ranks make the same call, as MPI does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        compare = self._jobs.check.compare
        self._jobs.check.compare = lambda call, *rest: compare(Call("something"), *rest)


class ComparesNamesOnly(Communicator):
    """Does not look at op, root, dtype and shapes, as in the first versions of reduce_scatter."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        compare = self._jobs.check.compare
        self._jobs.check.compare = lambda call, *rest: compare(Call(call.name), *rest)


class RaisesOnOneRankOnly(Communicator):
    """Raises for an invalid argument at once, so that the other ranks wait."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)

        def raise_here(name, error):
            raise error

        self._jobs.rejected = raise_here


class TakesTheInputLater(Communicator):
    """Reads the tensor only when its turn comes."""

    def start_allreduce(self, x, op="sum", **factors):
        return self.engine.submit(lambda: self._jobs.allreduce(x, op, 1.0, 1.0)())


class ForgetsToScale(Communicator):
    """Ignores the factor after the reduction."""

    def allreduce(self, x, op="sum", *, prescale_factor=1.0, postscale_factor=1.0):
        return super().allreduce(x, op, prescale_factor=prescale_factor)


class IgnoresTags(Communicator):
    """Gives the next message of a rank, whatever its tag."""

    def recv_obj(self, source, tag=0, status=None):
        return super().recv_obj(source, ANY_TAG, status)


class SortsTheRanks(Communicator):
    """Orders a subgroup by rank."""

    def subgroup(self, ranks):
        return super().subgroup(sorted(ranks))
