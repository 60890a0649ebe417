"""``torchmn doctor``: examine hosts and the links between them, before a job or after a failed one.

The launcher (`examination`) starts a program on each host (`host_main`) and sends it orders over
its standard streams, which works even where ports are closed. Each check is a file with two
functions: one reads or measures facts on a host, the other derives findings from the facts of all
hosts. Starts without torch.
"""
