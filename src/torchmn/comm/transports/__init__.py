"""Transports: gloo, NCCL, MPI, TCP and shared memory behind one interface."""
