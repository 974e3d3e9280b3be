"""Which of vLLM's connectors, that copy KV caches to other servers or to other memory, go with draft trees."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
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


def connector_flag(vllm_config: Any) -> str:
    """The flag by which a server with this ``VllmConfig`` gets a connector: of both, vLLM takes that of offloading."""
    return "--kv-transfer-config" if vllm_config.cache_config.kv_offloading_size is None else "--kv-offloading-size"


def planned_transfer(vllm_config: Any) -> Any:
    """The ``KVTransferConfig`` that a server will have, None without one: vLLM makes it of --kv-offloading-size after
    it has asked who serves."""
    transfer = copy.deepcopy(vllm_config.kv_transfer_config)
    planned = SimpleNamespace(cache_config=vllm_config.cache_config, kv_transfer_config=transfer)
    type(vllm_config)._post_init_kv_transfer_config(planned)
    return planned.kv_transfer_config


def planned_nixl(vllm_config: Any) -> str | None:
    """The connector of NIXL that a server with this ``VllmConfig`` will have; None without one."""
    transfer = planned_transfer(vllm_config)
    if transfer is None or transfer.kv_connector is None:
        return None
    return next((name for name in connectors_of(transfer) if name.startswith("Nixl")), None)


def unserved_connectors(transfer: Any, flag: str = "--kv-transfer-config") -> list[str]:
    """Why our worker does not serve with this ``KVTransferConfig``, None without one; empty where it does.

    flag: `connector_flag`.
    """
    if transfer is None or transfer.kv_connector is None:
        return []
    reasons = [
        f"{flag}: {name} has not been tried with draft trees, only {', '.join(SERVED)} are served"
        for name in connectors_of(transfer)
        if name not in SERVED or transfer.kv_connector_module_path
    ]
    if transfer.enable_permute_local_kv:
        reasons.append("--kv-transfer-config: enable_permute_local_kv has not been tried with draft trees")
    return reasons
