"""Ways to start the processes of a job: local, ssh, torchrun, mpirun, srun."""
