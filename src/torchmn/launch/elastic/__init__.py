"""Jobs that go on with fewer or more hosts: rounds of torchrun's agents, and copies in memory."""
