"""Launchers of the agents of a job: local, remote (ssh), mpirun and srun."""
