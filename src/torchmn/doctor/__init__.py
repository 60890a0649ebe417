"""``torchmn doctor``: examine hosts and the links between them, before a job or after a failed one.

A program on each host (`host_main`) examines it when the launcher (`examination`) orders so over
its standard streams, which works where ports are closed. Each check is a file: what is
read or measured on a host, and a pure function from the facts of all hosts to findings. Starts
without torch.
"""
