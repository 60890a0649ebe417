"""Launchers of the agents of a job: local, remote (ssh), torchrun, mpirun and srun."""
