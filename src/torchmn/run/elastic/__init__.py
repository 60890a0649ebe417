"""Elastic jobs, which continue with fewer or more hosts: rounds of torchrun's agents."""
