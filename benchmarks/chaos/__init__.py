"""The parts of `bench_chaos.py`: a training, the faults that meet it, and what must come of it."""
