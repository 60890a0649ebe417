"""Read the records of a run."""
