"""Elastic jobs, which continue in rounds with fewer or more hosts."""
