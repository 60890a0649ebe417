"""What the records of runs say: reading them, reports, and plans for other clusters."""
