"""The configuration of the engine that is making one of our parts inside vLLM's own offloading connector.

vLLM hands an ``OffloadingSpec`` a digest of its configuration (:class:`vllm.v1.kv_offload.config.OffloadingConfig`) that leaves out
most of what decides whether two engines' bytes are interchangeable: the hash algorithm, the model's revision and quantization,
how the KV cache is cut. A namespace is never guessed, so it is read where it is: every way on which vLLM makes a spec or a
tier passes through a constructor that has ``vllm_config`` and ``kv_cache_config`` as arguments. Nothing is changed there. Where they
are not found, the engine does not start.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

from maru_core.errors import ConfigError

#: Calls between the connector's constructor and ours; vLLM 0.32 has at most six.
_FRAMES_MAX: Final = 16
_INSTEAD: Final = "use the connector MaruConnector"


class Surroundings(NamedTuple):
    vllm_config: Any
    kv_cache_config: Any


def find_surroundings() -> Surroundings:
    """What the nearest caller that has both has.

    Raises:
        ConfigError: no caller has them, or the engine has what cannot be supported under vLLM's own connector.
    """
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        vllm_config, kv_cache_config = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(vllm_config, VllmConfig) and isinstance(kv_cache_config, KVCacheConfig):
            break
        if frame.f_back is None:
            raise _unknown_vllm()
        frame = frame.f_back
    else:
        raise _unknown_vllm()
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "--enable-lora: vLLM's block hashes have an adapter's name and path and not its content, and its OffloadingConnector does not say "
            f"which adapter a key is of: {_INSTEAD}"
        )
    if any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in kv_cache_config.kv_cache_groups):
        # vLLM's scheduler sees one spec for all layers of such a group and its workers see each: they would look in two namespaces.
        raise ConfigError(f"layers of different shapes share a KV cache group: {_INSTEAD}")
    return Surroundings(vllm_config, kv_cache_config)


def _unknown_vllm() -> ConfigError:
    return ConfigError(
        "this vLLM does not make its offloading parts inside a connector that knows its configuration, so what makes two "
        f"engines' KV interchangeable cannot be established: use vLLM 0.32, or {_INSTEAD.removeprefix('use ')}"
    )
