"""Reports on runs: where the time of a step goes, what limits it, and what to do about it."""
