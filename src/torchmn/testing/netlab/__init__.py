"""Test hosts on one machine: network namespaces joined by a bridge, their links shaped.

A *lab* is a switch and some hosts. Each host has its own network, host name, ``/etc/hosts`` and
``/dev/shm``, so that launchers and MPI take it for a machine; processors, memory and all other
files are those of the machine. Nothing of the machine's own network is touched.
"""

from torchmn.testing.netlab.lab import Host, Lab, netlab
from torchmn.testing.netlab.namespaces import missing_requirement

__all__ = ["Host", "Lab", "missing_requirement", "netlab"]
