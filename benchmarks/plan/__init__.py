"""The parts of bench_plan.py."""
