"""Watching over a job: last words, hangs, and the verdict; under any launcher."""
