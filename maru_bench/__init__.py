"""Maru's tools: the prefix-sharing experiment and the benchmarks (``maru-bench``).

Nothing here is imported by the server or by an engine.
"""
