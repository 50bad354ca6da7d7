"""Holds the stand-in ``sgl_kernel``; it is found by :mod:`maru_engine_kit.imports`, not imported from here."""
