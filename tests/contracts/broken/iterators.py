"""Iterators over ranks that are wrong, by what they put in place of a part of the right ones."""

from torchmn.data import multi_node_iterator, synchronized_iterator
from torchmn.data.multi_node_iterator import MultiNodeIterator, MultiNodeLoader, _FromMaster
from torchmn.data.permutations import draw_seed

_on_master, _iter = _FromMaster._on_master, MultiNodeLoader.__iter__


class ForgetsDtypes:
    """ChainerMN's: floating-point numbers become float32."""

    @staticmethod
    def apply(patch):
        def narrow(self):
            batch = _on_master(self, next)
            return {k: v.float() if k == "image" else v for k, v in batch.items()}

        patch.setattr(MultiNodeIterator, "__next__", narrow)


class KeepsTheFirstState:
    """The state does not follow the batches."""

    @staticmethod
    def apply(patch):
        note = _FromMaster._note

        def note_once(self, seen):
            before = getattr(self, "_state", None)
            note(self, seen)
            self._state = before or self._state

        patch.setattr(_FromMaster, "_note", note_once)


class EndsAfterOnePass:
    """A loader that can be iterated once."""

    @staticmethod
    def apply(patch):
        def once(self):
            if hasattr(self, "has_ended"):
                return
            self.has_ended = True
            yield from _iter(self)

        patch.setattr(MultiNodeLoader, "__iter__", once)


class TakesErrorsForTheEnd:
    """A rank whose master raised takes the data for exhausted."""

    @staticmethod
    def apply(patch):
        patch.setattr(multi_node_iterator, "DataError", StopIteration)


class SeedsEachRank:
    """Each rank has an order of its own."""

    @staticmethod
    def apply(patch):
        reset = synchronized_iterator.SerialIterator.reset
        patch.setattr(
            synchronized_iterator.SerialIterator,
            "reset",
            lambda self, seed=None: reset(self, None if seed is None else draw_seed()),
        )
