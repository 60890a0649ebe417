"""Many idle ranks on one machine: what `bench_scale.py` measures."""
