"""The table of a training as a user writes it."""

TEXT = """
title = "a small training"
parameters = 5_000_000
samples = 32
compute_s = 0.100
backward_share = 0.6
deviations = [-0.02, 0.0, 0.0, 0.03]
hosts = 2
rate = "1gbit"
latency_s = 1e-4
send_s_per_byte = 1e-9
codecs.int8 = { name = "int8", bits = 8.1, encode_s = 1e-9, decode_s = 5e-10 }
"""
