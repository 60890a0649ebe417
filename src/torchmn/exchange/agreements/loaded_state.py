"""States of optimizers that were loaded."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import PassContext
from torchmn.exchange.agreements.together import Together


class LoadedState(Together):
    """Whether a rank has loaded an optimizer state. Those that have left their loops need not."""

    what = (
        "loaded an optimizer state since the last exchange. Call load_state_dict() on all ranks, "
        "between the same steps, or only before create_multi_node_optimizer, which gives all ranks "
        "the state of rank 0"
    )

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return super().contribute(context) if context.is_active else (0.0, 0.0)

    @property
    def num_expected(self) -> int:
        """See `Together.num_expected`."""
        return self.num_active
