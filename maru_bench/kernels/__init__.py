"""``maru-bench kernels``: how fast paged KV moves between a GPU and the pool, beside every other way to move it.

``command`` is the command line, ``measure`` the run, ``peers`` the ways to move, ``cases`` what is moved and how it is checked,
``models`` whose KV, ``result`` the figures. ``measure``, ``peers`` and ``cases`` need torch.
"""
