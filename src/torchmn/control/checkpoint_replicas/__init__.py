"""In-memory copies of checkpoints, kept by the agents of other hosts."""
