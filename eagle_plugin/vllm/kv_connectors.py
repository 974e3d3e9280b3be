"""Which of vLLM's connectors, that copy KV caches to other servers or to other memory, go with draft trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# They copy blocks whose tokens are accepted, after a step or before the next: the accepted rows of a tree are moved by
# then, and the head has read them. The first two were tried on a CPU, the others need a GPU and were read.
SERVED = (
    "NixlConnector",
    "ExampleConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


def connectors_of(kv_transfer_config: Any) -> Iterator[str]:
    """The names of the connectors of a vLLM ``KVTransferConfig``, those inside of others included."""
    name = kv_transfer_config.kv_connector
    if name != "MultiConnector":
        yield str(name)
        return
    for child in kv_transfer_config.kv_connector_extra_config.get("connectors", ()):
        yield str(child.get("kv_connector"))


def unserved_connectors(kv_transfer_config: Any) -> list[str]:
    """Why our worker does not serve with this ``KVTransferConfig``, None without one; empty where it does."""
    if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
        return []
    reasons = [
        f"--kv-transfer-config: {name} has not been tried with draft trees, only {', '.join(SERVED)} are served"
        for name in connectors_of(kv_transfer_config)
        if name not in SERVED or kv_transfer_config.kv_connector_module_path
    ]
    if kv_transfer_config.enable_permute_local_kv:
        reasons.append("--kv-transfer-config: enable_permute_local_kv has not been tried with draft trees")
    return reasons
