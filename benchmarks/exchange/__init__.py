"""The parts of `bench_exchange.py`: the table, its sides, the workers, and their coordinator."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for tests.netlab
