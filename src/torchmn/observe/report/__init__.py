"""What the records of runs say: where the time of a step goes, what limits it, and what to do."""
