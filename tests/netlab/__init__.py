"""Test hosts on one machine: network namespaces joined by a bridge, their links shaped.

A *lab* is a switch and some hosts. Each host has its own network, host name, ``/etc/hosts`` and
``/dev/shm``, so that launchers and MPI treat it as a machine; processors, memory and all other
files are shared with the machine. The machine's own network is not changed.
"""

from tests.netlab.lab import Host, Lab, netlab
from tests.netlab.namespaces import missing_requirement

__all__ = ["Host", "Lab", "missing_requirement", "netlab"]
