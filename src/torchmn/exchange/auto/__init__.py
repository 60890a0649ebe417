"""Choosing schedule, codec and bucket size by measurement."""
