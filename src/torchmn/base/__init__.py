"""Shared by all wings: errors, events, names of components, and access to torch's private API."""
