"""Exchanges the served draft head in vLLM: loads another head beside it, then takes it between two steps."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config

from eagle_plugin.common.deploy_folder import Served
from eagle_plugin.heads.block_config import METHOD
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.same_form import check_same_form
from eagle_plugin.heads.vllm_rules import check_head
from eagle_plugin.runtime.head_mailbox import HeadMailbox, open_mailbox
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.backend import tree_attention
from eagle_plugin.vllm.plugin_config import plugin_config

KEPT = ("model", "levels", "_draft_to_target", "_draft_attn_layer_names")  # attributes of a drafter that a head has


def mailbox_of(runner: Any, logger: logging.Logger) -> HeadMailbox | None:
    """Where a `TreeModelRunner` finds requests to exchange its head; see `open_mailbox`.

    The engines of a server with data parallelism are its ranks too: they share the folder and would answer each other's
    requests.
    """
    config = runner.vllm_config
    head, parallel = config.speculative_config, config.parallel_config
    served = Served("vllm", config.model_config.model, head.model, head.method.upper())
    ours = plugin_config(head)
    assert ours is not None
    exchange, ranks = partial(exchange_head, runner), parallel.world_size * ours.engines
    rank = parallel.rank + parallel.world_size * parallel.data_parallel_index
    return open_mailbox(served, exchange, logger, rank=rank, ranks=ranks)


def exchange_head(runner: Any, head: Path) -> None:
    """Serve the head of a folder from the next step on; requests go on.

    The new head's layers take over the cache of the old one's, with the keys that the old head wrote: texts do not
    depend on them. What the policy learned of the old head's drafts is forgotten.

    Raises:
        HeadError: the head is not of the target, or not of the form of the served one. Whatever is raised: the served
        head stays.
    """
    config, drafter = runner.vllm_config, runner.drafter
    if config.speculative_config.method == METHOD:
        raise HeadError(
            f"{head} cannot take the place of a block drafter that is served, start the server again with it"
        )
    if config.speculative_config.method == mtp_support.METHOD:
        raise HeadError(
            f"{head} cannot take the place of MTP layers, which are the target's own; start the server again with it"
        )
    draft = config.speculative_config.draft_model_config
    check_head(config.model_config.model, head, config.speculative_config.method)
    check_same_form(draft.model, head)
    layers = config.compilation_config.static_forward_context
    present = {name: layers.pop(name) for name in drafter._draft_attn_layer_names}
    before = {name: getattr(drafter, name) for name in KEPT}
    served, draft.model = draft.model, str(head)
    captures = False
    try:
        with set_current_vllm_config(config), tree_attention(config):
            drafter.load_model(runner.get_model())
        for name, layer in present.items():
            layers[name].kv_cache = layer.kv_cache
        captures = True
        runner.capture_steps()  # graphs have the addresses of the old head's weights
    except BaseException:
        draft.model = served
        for name in drafter._draft_attn_layer_names:
            layers.pop(name, None)
        layers.update(present)
        for name, value in before.items():
            setattr(drafter, name, value)
        if captures:
            _capture_again(runner)
        raise
    config.speculative_config.model = str(head)
    runner._shapes.chooser.forget_head()


def _capture_again(runner: Any) -> None:
    """Give the served head its graphs back; without them it serves too, and what failed before is what is told."""
    try:
        runner.capture_steps()
    except Exception as error:
        logging.getLogger("vllm.eagle_plugin").warning("eagle-plugin: decode steps run without graphs now: %s", error)
