"""Until exchange/ emits events itself."""

from torchmn import events


def exchange_failed(error: BaseException) -> None:
    """Tell observers."""
    for observer in events.observers:
        observer.failed(error)
