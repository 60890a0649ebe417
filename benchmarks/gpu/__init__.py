"""Parts of `make bench-gpu`."""
