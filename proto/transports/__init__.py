"""Transports of the barrier path: the interface, threads of one process, and `torch.distributed`."""
