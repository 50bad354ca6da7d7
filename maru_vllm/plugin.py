"""Entry point ``vllm.general_plugins``: makes ``"kv_connector": "MaruConnector"`` a name that stock vLLM knows.

vLLM calls :func:`register` in each of its processes, some of them more than once. Nothing is imported here but vLLM's
registry: torch and the rest of Maru are loaded by a process that asks for the connector.
"""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

CONNECTOR: Final = "MaruConnector"
MODULE: Final = "maru_vllm.connector"
#: For vLLM's own OffloadingConnector: its ``spec_name``, and a ``type`` of its ``secondary_tiers``.
SPEC: Final = "MaruOffloadingSpec"
TIER: Final = "maru"


def register() -> None:
    """Called by vLLM. Never raises: whoever does not ask for Maru must not notice that it is installed."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except Exception:
        logger.exception("the connector %s could not be made known to this vLLM", CONNECTOR)
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if SPEC not in OffloadingSpecFactory._registry:
            OffloadingSpecFactory.register_spec(SPEC, "maru_vllm.offloading", SPEC)
        if TIER not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier(TIER, "maru_vllm.tier", "MaruTierManager")
    except Exception:
        logger.exception("the offloading spec %s and the tier %r could not be made known to this vLLM", SPEC, TIER)
