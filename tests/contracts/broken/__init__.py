"""Implementations that are wrong on purpose: each contract must catch the one made for it."""
