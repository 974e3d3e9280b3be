"""Which rows of SGLang's batches are of requests whose hidden states are stored, and where their answers end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from eagle_plugin.collect.collector import Collector, Ending, StepRows
from eagle_plugin.collect.metrics import FeatureMetrics
from eagle_plugin.collect.settings import CollectError, StatesFacts, collect_settings
from eagle_plugin.core.verify import Accepted
from eagle_plugin.heads.aux_layers import captured_layers
from eagle_plugin.runtime.accept import accepted_rows, last_tokens
from eagle_plugin.runtime.collect_start import check_collecting
from eagle_plugin.runtime.host_to_device import to_device
from eagle_plugin.runtime.request_features import asked_features
from eagle_plugin.runtime.startup import StartRefused
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.ranks import rank_logger
from eagle_plugin.traffic.served import ServedTarget

logger = logging.getLogger("eagle_plugin")

PREFIX_LIMIT = "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len"


class LastStates:
    """What the target's output layer reads, of the newest forward: the engine returns the aux states in its place."""

    def __init__(self, model: Any) -> None:
        self._newest: Tensor | None = None
        layer = next(module for module in model.modules() if isinstance(module, LogitsProcessor))
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._newest = named["hidden_states"] if "hidden_states" in named else arguments[1]

    def take(self) -> Tensor:
        """[N, H], of all rows; once per forward."""
        found, self._newest = self._newest, None
        assert found is not None
        return found


class WorkerFeatures:
    """The collector of a worker, and what it takes of each prefill and round."""

    def __init__(self, collector: Collector, last: LastStates, has_aux: bool) -> None:
        self._collector, self._last, self._has_aux = collector, last, has_aux
        self._requests: dict[str, Any] = {}  # SGLang ``Req`` by name, of open documents

    def prefill(self, batch: Any, result: Any) -> None:
        """Take a prefill, of whole prompts or of parts of them."""
        last = self._last.take()
        for request in batch.reqs:
            self._begin(request)
        lens, firsts = list(batch.extend_lens), list(batch.prefix_lens)
        asked = [i for i, request in enumerate(batch.reqs) if request.rid in self._collector]
        if asked:
            starts = np.cumsum(lens) - lens
            rows = np.concatenate([np.arange(starts[i], starts[i] + lens[i]) for i in asked])
            positions = np.concatenate([np.arange(firsts[i], firsts[i] + lens[i]) for i in asked])
            ids = [token for i in asked for token in batch.reqs[i].get_fill_ids()[firsts[i] : firsts[i] + lens[i]]]
            spans = [lens[i] for i in asked]
            arrays = [np.array(values, dtype=np.int64) for values in (rows, positions, ids, spans, asked)]
            order, places, tokens, counts, requests = to_device(arrays, last.device)
            states = self._side_by_side(result.logits_output.hidden_states, last, order)
            names = [batch.reqs[i].rid for i in asked]
            following = result.next_token_ids.long()[requests]
            self._collector.add(StepRows(names, spans, counts, tokens, places, states, following))
        self._finish()

    def round(
        self, requests: Sequence[Any], inputs: RoundBatch, tokens: Tensor, accepted: Accepted, features: Tensor,
        last: Tensor,
    ) -> None:  # fmt: skip
        """Take a round; tokens [b, W] are those of the trees, features and last [B * W, ...] the states after nodes."""
        asked = [i for i, request in enumerate(requests) if request.rid in self._collector]
        if asked:
            (places,) = to_device([np.array(asked, dtype=np.int64)], last.device)
            b, width = tokens.shape
            rows = accepted_rows(Accepted(*(values[:b] for values in accepted)), width)[places]  # [k, E]
            lengths = accepted.lengths.long()[places]
            longest = rows.shape[1]
            positions = inputs.prefix_lens[places][:, None] + torch.arange(longest, device=last.device)
            order = rows.view(-1)
            states = self._side_by_side(features, last, order)
            found = StepRows(
                [requests[i].rid for i in asked],
                [longest] * len(asked),
                lengths,
                tokens.reshape(-1)[order],
                positions.view(-1),
                states,
                last_tokens(accepted, places),
            )
            self._collector.add(found)
        self._finish()

    def _side_by_side(self, features: Tensor, last: Tensor, order: Tensor) -> Tensor:
        return torch.cat([features[order], last[order]], dim=-1) if self._has_aux else last[order]

    def _begin(self, request: Any) -> None:
        sampling = request.sampling_params
        asked = asked_features(sampling.custom_params)
        if asked is None or request.rid in self._collector:
            return
        if request.lora_id is not None or request.multimodal_inputs is not None or request.input_embeds is not None:
            self._collector.drop("not_text_of_the_target")  # an adapter's states, or those of images
            return
        ending = Ending(_stops_of(request), sampling.min_new_tokens, sampling.max_new_tokens)
        prompt = len(request.origin_input_ids)
        facts = asked.id, asked.source, asked.split, prompt, asked.given, ending, asked.earlier
        self._collector.begin(request.rid, *facts)
        self._requests[request.rid] = request

    def _finish(self) -> None:
        ended = [name for name, request in self._requests.items() if request.finished()]
        if ended:
            self._collector.finish(ended)
        self._requests = {name: one for name, one in self._requests.items() if name in self._collector}


def _stops_of(request: Any) -> frozenset[int]:
    sampling, tokenizer = request.sampling_params, request.tokenizer
    if sampling.ignore_eos:
        return frozenset()
    found = {*(sampling.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return frozenset(found - {None})


def last_states(model: Any) -> LastStates | None:
    """What keeps the last states of a target; None where nothing is collected. Raises StartRefused."""
    if collect_settings() is None:
        return None
    if get_parallel().attn_dp_size > 1:
        check_collecting(["it has --enable-dp-attention"])
    return LastStates(model)


def worker_features(worker: Any, last: LastStates | None) -> WorkerFeatures | None:
    """What collects the states of a worker; None where nothing is collected, or another rank writes.

    Raises:
        StartRefused: the settings are wrong, or the store is of another target.
    """
    try:
        return _worker_features(worker, last)
    except CollectError as error:
        raise StartRefused(error) from None


def _worker_features(worker: Any, last: LastStates | None) -> WorkerFeatures | None:
    settings = collect_settings()
    if settings is None or last is None:
        return None
    source = HookSource("eagle_plugin", "eagle-plugin")
    HookRegistry.register(PREFIX_LIMIT, _skip_prefix_cache, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
    if get_parallel().attn_tp_group.rank_in_group:
        return None
    args, config = worker.server_args, worker._target_worker.model_runner.model_config
    served = ServedTarget.of(args.model_path, args.revision, args.tokenizer_path, args.chat_template).located()
    text = config.hf_text_config
    aux: tuple[int, ...] = ()
    if worker.speculative_algorithm.is_eagle3():
        head, architecture = worker._draft_worker.draft_runner.model_config, config.hf_config.architectures[0]
        folder = Path(args.speculative_draft_model_path)
        aux = captured_layers(architecture, int(text.num_hidden_layers), head.hf_config.to_dict(), folder)
    dtype = str(config.dtype).removeprefix("torch.")
    settings = settings.with_facts(StatesFacts.of(served, aux, dtype, text))
    show = FeatureMetrics(args.served_model_name or args.model_path).update if args.enable_metrics else _nothing
    collector = Collector.of(settings, show)
    line = "eagle-plugin: hidden states of requests that ask for it are stored in %s"
    rank_logger(logger).info(line, settings.shown)
    return WorkerFeatures(collector, last, bool(aux))


def _nothing(totals: Counter[str]) -> None:
    """Nobody asked for metrics."""


def _skip_prefix_cache(original: Any, request: Any, input_len: int) -> int:
    """AROUND the limit of what a request takes from the prefix cache: the states of tokens there are not seen."""
    asked = asked_features(request.sampling_params.custom_params)
    most: int = original(request, input_len)
    return most if asked is None else 0
