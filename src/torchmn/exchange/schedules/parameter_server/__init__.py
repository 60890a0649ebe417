"""The asynchronous parameter server."""
