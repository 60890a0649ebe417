"""Time to a fixed validation loss of a small language model over a slow link."""
