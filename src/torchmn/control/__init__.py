"""The authenticated control plane between launcher, agents and scripts."""
