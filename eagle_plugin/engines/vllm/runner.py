"""vLLM's V1 model runner with draft trees: the engine prepares, forwards and keeps the books, ours are the trees."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

import eagle_plugin
from eagle_plugin.core.verify import Accepted
from eagle_plugin.engines.vllm.attention import TreeAttentionBackend, TreeMetadata
from eagle_plugin.engines.vllm.drafter import TreeProposer, plan_extension
from eagle_plugin.engines.vllm.logprobs import said_logprobs, wants_logprobs
from eagle_plugin.engines.vllm.options import Options
from eagle_plugin.engines.vllm.step import DraftStore, Step, plan_step
from eagle_plugin.engines.vllm.targets import (
    forget_strayed_budgets,
    min_ps,
    minimal_lengths,
    node_rows,
    plain_requests,
    transform_logits,
)
from eagle_plugin.engines.vllm.verifier import (
    CacheGroup,
    random_keys,
    roots_only,
    said,
    sampling_params,
    verify,
    whole_tree,
)
from eagle_plugin.kernels import loader

logger = logging.getLogger("vllm.eagle_plugin")
BACKEND = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"


class TreeModelRunner(CPUModelRunner):
    """One step: plan the trees, forward, walk, move what was accepted, draft the next trees."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._shape = Options.read(vllm_config.additional_config).shape(self.num_spec_tokens)
        self.drafter: TreeProposer = TreeProposer(vllm_config, device, self)
        self._store = DraftStore()
        self._step: Step | None = None
        self._accepted: Accepted | None = None
        self._metadata: dict[str, TreeMetadata] = {}
        self._groups: list[CacheGroup]
        # With drafts vLLM itself leaves min_p and logit_bias out.
        self.input_batch.logitsprocs = LogitsProcessors(
            processor(vllm_config, device, PIN_MEMORY) for processor in BUILTIN_LOGITS_PROCESSORS
        )

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load both models over our attention backend, which stands for the platform's while they are built."""
        enum = registry.AttentionBackendEnum.CPU_ATTN
        before = registry._ATTN_OVERRIDES.get(enum)
        registry.register_backend(enum, BACKEND)
        selector._cached_get_attn_backend.cache_clear()
        try:
            super().load_model(load_dummy_weights)
        finally:
            registry._ATTN_OVERRIDES.pop(enum, None)
            if before is not None:
                registry._ATTN_OVERRIDES[enum] = before
            selector._cached_get_attn_backend.cache_clear()
        logger.info(
            "eagle-plugin %s: %s is served by the plugin's tree runner "
            "(at most %d steps, %d children a node, %d nodes; %s kernels)",
            eagle_plugin.__version__,
            self.speculative_config.method,
            *self._shape,
            loader.backend(self.device.type),
        )

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the caches as the engine does, and note where the target's are."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        # One state a request, not one a drafted token; the batch may have been made anew until now.
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, PIN_MEMORY
        )
        context = self.compilation_config.static_forward_context
        self._groups = []
        for group in self.kv_cache_config.kv_cache_groups:
            names = [name for name in group.layer_names if name not in self.drafter._draft_attn_layer_names]
            caches = [context[name].kv_cache for name in names if isinstance(context[name], AttentionLayerBase)]
            if caches:
                self._groups.append(CacheGroup.of(names[0], caches))

    def _update_states(self, scheduler_output: Any) -> Any:
        """Forget the trees of finished requests as well; this is called in steps without tokens too."""
        self._store.forget(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        """Prepare as the engine does, then put the tree's tokens and positions into their rows."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        drafts = np.array(prepared[1].num_draft_tokens, dtype=np.int64)
        b = len(drafts)
        prefix_lens = self.num_computed_tokens[:b]
        step = plan_step(drafts, num_scheduled_tokens, self.input_batch.req_ids, prefix_lens, self._store)
        if len(step.trees):
            positions = step.prefix_lens[step.trees, None] + step.tree.depths
            # Padding shares the row of a tree's last node, whose numbers it must not overwrite.
            place = torch.arange(step.width, device=positions.device)
            real = place < step.lens[step.trees, None]
            rows = step.query[real]
            self.positions[rows] = positions[real]
            drafted = real & (place > 0)
            self.input_ids.gpu[step.query[drafted]] = step.tree.tokens[drafted].int()
        self._step = step
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Let the builders know the trees of this step."""
        step = self._step
        builders = [group.get_metadata_builder() for groups in self.attn_groups for group in groups]
        for builder in builders:
            builder.rows = None if step is None else step.rows()
        try:
            built = super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.rows = None
        self._metadata = built[0]
        return built

    def _sample(self, logits: Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Walk every request's tree; a request without drafts has a tree of one node."""
        step = self._step
        assert step is not None
        self.input_batch.update_async_output_token_ids()
        metadata = self.input_batch.sampling_metadata
        tree = whole_tree(step)
        states = [self.requests[name] for name in self.input_batch.req_ids]
        forget_strayed_budgets(metadata, states)
        if plain := plain_requests(metadata):
            tree = roots_only(tree, torch.tensor(plain, device=self.device))
        raw, logits = logits, logits.float()
        minimal = minimal_lengths(states)
        if minimal or not _plainly_sampled(metadata):
            drafts = spec_decode_metadata.num_draft_tokens
            rows = node_rows(step.b, step.width, step.logits_rows, drafts, self.device)
            logits = logits.clone() if logits is raw else logits
            logits = transform_logits(metadata, tree, step.roots, minimal, rows, logits)
        params = sampling_params(metadata, min_ps(metadata, step.b), step.b, logits.shape[1], self.device)
        keys = random_keys(metadata.generators, step.b, self.device)
        walked = logits if step.logits_rows is None else logits[step.logits_rows.view(-1)]
        verified = verify(step, tree, walked, params, keys, self._shape)
        self._accepted = accepted = verified.accepted
        if len(step.trees):
            for group in self._groups:
                group.compact(step, accepted, self._metadata[group.layer].slot_table)
        logprobs = None
        if wants_logprobs(metadata):
            at = verified.logits_rows.view(-1)
            mode = self.model_config.logprobs_mode
            logprobs = said_logprobs(self.sampler, mode, metadata, params, raw[at], logits[at], accepted)
        return SamplerOutput(sampled_token_ids=said(accepted), logprobs_tensors=logprobs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the books as the engine does, without generators: it winds them back, and ours only hold seeds."""
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Tensor,
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Tensor:
        """Draft the next trees of the batch; returns their tokens [b, W - 1], whose links stay here."""
        step, accepted = self._step, self._accepted
        assert step is not None and accepted is not None
        next_tokens, counts = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        self._copy_valid_sampled_token_count(next_tokens, counts)
        rows = scheduler_output.total_num_scheduled_tokens
        features = hidden_states if aux_hidden_states is None else torch.cat(aux_hidden_states, dim=-1)
        extension = plan_extension(step, accepted, next_tokens, self.input_ids.gpu[:rows], self.positions[:rows])
        chains = self._chains()
        params = sampling_params(sampling_metadata, None, step.b, self.input_batch.vocab_size, self.device)
        if chains is not None:  # what is drawn at random would not be a first child
            params = params._replace(top_ks=params.top_ks.masked_fill(chains, 1))
        keys = None
        if not sampling_metadata.all_greedy:
            keys = random_keys(sampling_metadata.generators, step.b, self.device)
        drafts = self.drafter.grow(
            self._shape,
            extension,
            features,
            next_tokens.long(),
            self._metadata[next(iter(self.drafter._draft_attn_layer_names))],
            params,
            keys,
            chains,
        )
        self._store.put(self.input_batch.req_ids, drafts)
        return drafts.tree.tokens[:, 1:]

    def _chains(self) -> Tensor | None:
        """Requests whose grammar the scheduler walks token by token [b] bool; None without any."""
        asked = [
            self.requests[name].sampling_params.structured_outputs is not None for name in self.input_batch.req_ids
        ]
        return torch.tensor(asked, device=self.device) if any(asked) else None


def _plainly_sampled(metadata: Any) -> bool:
    """Whether no request changes its logits before temperature and filters, but for minimal lengths."""
    processors = metadata.logitsprocs.non_argmax_invariant
    return (
        metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and metadata.no_penalties
        and not any(getattr(p, "biases", None) for p in processors)
        and not plain_requests(metadata)
    )
