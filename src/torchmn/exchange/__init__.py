"""From autograd's hooks to means in ``p.grad``: buckets, the optimizer, schedules, their choice."""
