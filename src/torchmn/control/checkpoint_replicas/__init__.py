"""Checkpoints in the memory of hosts, each held by two of them."""
