"""Jobs of PBS, Slurm and Grid Engine: write, submit and follow them. Without torch."""
