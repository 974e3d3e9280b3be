"""Which rows of vLLM's steps are of requests whose hidden states are stored, and where their answers end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.collect.collector import Collector, Ending, StepRows
from eagle_plugin.collect.metrics import CountFile
from eagle_plugin.collect.settings import CollectSettings, StatesFacts, collect_settings
from eagle_plugin.runtime.accept import last_tokens
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.request_features import asked_features
from eagle_plugin.traffic.served import ServedTarget
from eagle_plugin.vllm import mtp_support
from eagle_plugin.vllm.plugin_config import plugin_config
from eagle_plugin.vllm.policy_reports import counts_of
from eagle_plugin.vllm.step_state import StepState

logger = logging.getLogger("vllm.eagle_plugin")


class StepFeatures:
    """The collector of a worker, and what it takes of each step."""

    def __init__(self, collector: Collector, max_model_len: int) -> None:
        self._collector, self._longest = collector, max_model_len

    def begin(self, requests: Iterable[Any]) -> None:
        """Note vLLM's ``NewRequestData`` of requests that ask for it."""
        for new in requests:
            params = new.sampling_params
            asked = asked_features(params.extra_args) if params is not None else None
            if asked is None or new.req_id in self._collector:
                continue
            if new.lora_request is not None or new.mm_features or new.prompt_token_ids is None:
                self._collector.drop("not_text_of_the_target")  # an adapter's states, or those of images
                continue
            prompt = len(new.prompt_token_ids)
            stops = frozenset(params.stop_token_ids or ()) | ({params.eos_token_id} - {None})
            most = min(params.max_tokens or self._longest, self._longest - prompt)
            ending = Ending(stops, params.min_tokens, most)
            facts = asked.id, asked.source, asked.split, prompt, asked.given, ending, asked.earlier
            self._collector.begin(new.req_id, *facts)

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        if len(self._collector):
            self._collector.finish(request_ids)

    def step(self, state: StepState, ids: Tensor, positions: Tensor, parts: Sequence[Tensor], last: Tensor) -> None:
        """Take a step; ids, positions [N], parts and last, each [N, ...], are the target's, of its query rows.

        parts: the states that the head reads; last: what lm_head reads, the same where the head reads no others.
        """
        names = state.names
        if not len(self._collector) or not any(name in self._collector for name in names):
            return
        batch, accepted = state.batch, state.accepted
        assert accepted is not None
        asked = [i for i, name in enumerate(names) if name in self._collector]
        plain, trees = [i for i in asked if not state.verifies[i]], [i for i in asked if state.verifies[i]]
        starts = np.cumsum(batch.host_lens) - batch.host_lens
        spans = [batch.host_lens[i] for i in plain]
        rows = np.concatenate([np.arange(starts[i], starts[i] + batch.host_lens[i]) for i in plain] or [np.arange(0)])
        of_tree = np.cumsum(state.verifies) - 1  # the place of each request among those with a tree
        order, counts, tree_places, request_places = to_device(
            [
                np.array(rows, dtype=np.int64),
                np.array(spans, dtype=np.int64),
                np.array([of_tree[i] for i in trees], dtype=np.int64),
                np.array([*plain, *trees], dtype=np.int64),
            ],
            batch.starts.device,
        )
        if trees:
            path = accepted.index[request_places[len(plain) :]].long().clamp(min=0)
            nodes = batch.query[tree_places].gather(1, path)
            order = torch.cat([order, nodes.view(-1)])
            counts = torch.cat([counts, accepted.lengths.long()[request_places[len(plain) :]]])
            spans += [nodes.shape[1]] * len(trees)
        following = last_tokens(accepted, request_places)
        wide = [last] if len(parts) == 1 and parts[0] is last else [*parts, last]
        states = torch.cat([part[order] for part in wide], dim=-1)
        found = StepRows(
            [names[i] for i in (*plain, *trees)], spans, counts, ids[order], positions[order], states, following
        )
        self._collector.add(found)


def step_features(runner: Any) -> StepFeatures | None:
    """What collects the states of a worker; None where ``EAGLE_FEATURES`` names no store, or another rank writes.

    Raises:
        CollectError: the settings are wrong, or the store is of another target.
    """
    from vllm.distributed.parallel_state import get_tp_group

    settings = collect_settings()
    if settings is None or get_tp_group().rank_in_group:
        return None
    config = runner.vllm_config
    settings = with_facts(settings, config, aux_layers_of(runner.get_model(), config.speculative_config.method))
    collector = Collector.of(settings, CountFile(_count_file(config)).update)
    logger.info("eagle-plugin: hidden states of requests that ask for it are stored in %s", settings.shown)
    return StepFeatures(collector, config.model_config.max_model_len)


def _count_file(vllm_config: Any) -> Path:
    """Where this engine of a server tells its counts."""
    config = plugin_config(vllm_config.speculative_config)
    assert config is not None and config.reports is not None
    return counts_of(config.reports, vllm_config.parallel_config.data_parallel_index)


def with_facts(settings: CollectSettings, vllm_config: Any, aux_layers: tuple[int, ...]) -> CollectSettings:
    """The settings with what the manifest of the store says of a server."""
    model = vllm_config.model_config
    served = ServedTarget.of(model.model, model.revision, model.tokenizer).located()
    dtype = str(model.dtype).removeprefix("torch.")
    return settings.with_facts(StatesFacts.of(served, aux_layers, dtype, model.hf_text_config))


def aux_layers_of(model: Any, method: str) -> tuple[int, ...]:
    """The layers whose input a target gives beside its last states, in the order of their columns."""
    if method in ("eagle", mtp_support.METHOD):
        return ()
    found = (getattr(module, "aux_hidden_state_layers", ()) for module in model.modules())
    return next(tuple(layers) for layers in found if layers)
