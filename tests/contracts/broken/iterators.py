"""Iterators over ranks that are wrong, by what they put in place of a part of the right ones."""

from torchmn.data import multi_node_iterator, synchronized_iterator
from torchmn.data.multi_node_iterator import MultiNodeIterator, MultiNodeLoader, _FromMaster
from torchmn.data.permutations import draw_seed

_on_master, _iter = _FromMaster._on_master, MultiNodeLoader.__iter__


def forgets_dtypes(patch):
    """ChainerMN's: floating-point numbers become float32."""

    def narrow(self):
        batch = _on_master(self, next)
        return {k: v.float() if k == "image" else v for k, v in batch.items()}

    patch.setattr(MultiNodeIterator, "__next__", narrow)


def keeps_the_first_state(patch):
    """The state does not follow the batches."""

    note = _FromMaster._note

    def note_once(self, seen):
        before = getattr(self, "_state", None)
        note(self, seen)
        self._state = before or self._state

    patch.setattr(_FromMaster, "_note", note_once)


def ends_after_one_pass(patch):
    """A loader that can be iterated once."""

    def once(self):
        if hasattr(self, "has_ended"):
            return
        self.has_ended = True
        yield from _iter(self)

    patch.setattr(MultiNodeLoader, "__iter__", once)


def takes_errors_for_the_end(patch):
    """A rank whose master raised takes the data for exhausted."""

    patch.setattr(multi_node_iterator, "DataError", StopIteration)


def seeds_each_rank(patch):
    """Each rank has an order of its own."""

    reset = synchronized_iterator.SerialIterator.reset
    patch.setattr(
        synchronized_iterator.SerialIterator,
        "reset",
        lambda self, seed=None: reset(self, None if seed is None else draw_seed()),
    )
