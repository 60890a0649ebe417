"""Failure and hang detection for all ranks of a job, under any launcher."""
