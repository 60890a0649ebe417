"""Read the records of runs, report on them, and predict training on other clusters."""
