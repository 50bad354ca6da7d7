"""Gather and scatter of paged KV on the GPU; knows nothing of SGLang.

This version has none: pages move between the GPU and SGLang's host pool by SGLang's own kernels, and between host pool
and Maru's pool by :class:`maru_core.mover.CxlMover`.
"""
