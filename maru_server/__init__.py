"""The metadata server: which object is in which slot of the pool. It never touches the objects' bytes.

State (``state`` and what it is made of) and I/O (``service``, ``cli``) are apart: the state has no sockets, clocks, threads
or randomness of its own.
"""
