"""Recurrent networks whose layers, or encoder and decoder, are on several ranks."""

from typing import Any

from torch import Tensor, nn

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.nn import functions


class MultiNodeNStepRNN(nn.Module):
    """A recurrent network that gets its hidden state from a rank and gives it to another one.

    Made by `create_multi_node_n_step_rnn`; ``link`` is the network of this rank.

    >>> from torchmn.nn import create_multi_node_n_step_rnn
    >>> rnn = create_multi_node_n_step_rnn(torch.nn.LSTM(3, 4), comm)  # the first and the last
    >>> output, state = rnn(torch.ones(2, 1, 3))[:2]
    """

    def __init__(
        self, link: nn.RNNBase, comm: Communicator, rank_in: int | None, rank_out: int | None
    ) -> None:
        super().__init__()
        self.link = link
        self.communicator = comm
        self.rank_in = rank_in
        self.rank_out = rank_out

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any, Tensor | None]:
        """Return the network's output and state, and the delegate variable of the state sent.

        Called by this rank; ``rank_in`` and ``rank_out`` call theirs. The delegate is None without
        ``rank_out``. Backward must reach it: add it to the loss, pass it to
        `torchmn.functions.pseudo_connect`, or call its ``backward()`` where there is no loss.

        Args:
            input: the input of the network, a tensor or a PackedSequence.
            hx: the first hidden state; only without ``rank_in``.

        Raises:
            UsageError: ``hx`` is given with ``rank_in``.
            CommunicationError: the other rank does not take part.
            RuntimeError and others of torch's network: the hidden state that ``rank_in`` sent is of
                another kind or shape.
        """
        if self.rank_in is not None:
            if hx is not None:
                raise UsageError(
                    f"{self.communicator.rank_label}: hx is given, but the hidden state comes from "
                    f"rank {self.rank_in} (rank_in={self.rank_in}). Give one of the two."
                )
            hx = functions.recv(self.communicator, self.rank_in)
        output, state = self.link(input, hx)
        delegate = None
        if self.rank_out is not None:
            delegate = functions.send(state, self.communicator, self.rank_out)
        return output, state, delegate


def create_multi_node_n_step_rnn(
    actual_link: nn.RNNBase,
    communicator: Communicator,
    rank_in: int | None = None,
    rank_out: int | None = None,
) -> MultiNodeNStepRNN:
    """Connect an LSTM, GRU or RNN with those of other ranks by its hidden state. Local.

    The network then returns ``(output, state, delegate)``; see `MultiNodeNStepRNN`.

    Args:
        actual_link: an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``.
        communicator: the ranks.
        rank_in: the rank that sends the first hidden state; None: the script passes it as ``hx``.
        rank_out: the rank that gets the last hidden state, or None.

    Raises UsageError: ``actual_link`` is another kind of module, or ``rank_in`` or ``rank_out`` is
    not another rank of ``communicator``.

    Example:
        >>> lstm = torch.nn.LSTM(3, 4)
        >>> rnn = torchmn.nn.create_multi_node_n_step_rnn(lstm, comm)  # of this rank alone
        >>> rnn(torch.ones(5, 2, 3))[0].shape
        torch.Size([5, 2, 4])
    """
    if not isinstance(actual_link, nn.RNNBase):
        raise UsageError(
            f"{communicator.rank_label}: create_multi_node_n_step_rnn takes an nn.LSTM, nn.GRU or "
            f"nn.RNN, not {type(actual_link).__name__}."
        )
    for name, rank in (("rank_in", rank_in), ("rank_out", rank_out)):
        if rank is not None and (not 0 <= rank < communicator.size or rank == communicator.rank):
            raise UsageError(
                f"{communicator.rank_label}: {name}={rank} must be another rank from 0 to "
                f"{communicator.size - 1}, or None."
            )
    return MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)
