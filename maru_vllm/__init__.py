"""The vLLM connector. This version has none: Maru works under SGLang (:mod:`maru_sglang`)."""
