"""The agent of a memory node: maps a pool, registers it with NIXL, tells the server how it is reached.

This version has none: every engine maps the pool itself (:class:`maru_core.mover.CxlMover`).
"""
