"""Local-update schedules: every rank trains alone for a block of samples, then all agree."""
