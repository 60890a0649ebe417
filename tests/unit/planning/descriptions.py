"""A description as a user writes it."""

TEXT = """
title = "a small training"
parameters = 5_000_000
backward_share = 0.6
deviations = [-0.02, 0.0, 0.0, 0.03]

[[batches]]
samples = 32
compute_s = 0.100

[[batches]]
samples = 64
compute_s = 0.180

[link]
rate = "1gbit"
latency_s = 1e-4
message_s = 1e-5

[codecs.int8]
bits = 8.1
encode_s = 1e-9
decode_s = 5e-10

[costs]
send_s_per_byte = 1e-9

[setting]
hosts = 2
"""
