"""Gradients from the hooks of parameters to the sums of buckets."""
