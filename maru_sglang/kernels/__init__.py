"""Copies between an engine's paged memory and the pool's mapping, on a GPU in one hop; knows nothing of SGLang.

``layout`` says where objects lie in an engine's pages, ``mover`` moves them. Under it are ``gather`` and ``scatter`` (Triton
kernels, each with its plain reference), ``batched`` (the GPU's copy engines), ``choose`` (which of them), ``pinning``
(page-locks the pool) and ``runtime`` (the calls of CUDA that torch does not have). Nothing is imported here: torch and Triton
are for those who need them.
"""
