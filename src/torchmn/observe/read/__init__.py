"""Reading the records of a run."""
