"""The exchange of gradients, from autograd's hooks to means in ``p.grad``."""
