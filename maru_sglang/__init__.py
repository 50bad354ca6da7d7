"""Maru inside SGLang: the plugin, the HiCache storage backend, and how SGLang's radix tree maps onto Maru.

Importing this package imports neither torch nor SGLang; :mod:`maru_sglang.plugin` is what SGLang calls.
"""
