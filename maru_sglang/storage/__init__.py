"""The HiCache storage backend of SGLang on Maru. Importing :mod:`maru_sglang.storage.backend` needs SGLang."""
