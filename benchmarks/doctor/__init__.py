"""The parts of `bench_doctor.py`: the faults, and the test hosts on which they are planted."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for tests.netlab
