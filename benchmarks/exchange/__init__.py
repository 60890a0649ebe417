"""The parts of `bench_exchange.py`: the table, its sides, the workers, and their coordinator."""
