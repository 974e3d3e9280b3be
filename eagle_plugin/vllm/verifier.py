"""Verifies the drafted trees of a batch: the logits of every node, the walk, the move of accepted keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput

from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.sampling import SamplingParams
from eagle_plugin.runtime.accept import accept, accepted_rows
from eagle_plugin.runtime.ranks import RankAgreement
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.accepted_tokens import CacheGroup, cache_groups, output_tokens
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.decode_step import DecodeStep
from eagle_plugin.vllm.linear_attention import LinearLayers
from eagle_plugin.vllm.logits import keeps_logits, minimal_lengths, node_rows, transform_logits
from eagle_plugin.vllm.logprobs import output_logprobs, wants_logprobs
from eagle_plugin.vllm.synthetic import synthetic_rates
from eagle_plugin.vllm.thinking import follow_budgets, plain_requests


class TreeVerifier:
    """Verification over the target's caches."""

    def __init__(
        self,
        groups: list[CacheGroup],
        linear: LinearLayers,
        sampler: Any,
        logprobs_mode: str,
        ranks: RankAgreement,
        synthetic: SyntheticRates | None = None,
    ) -> None:
        """sampler is vLLM's ``Sampler``, whose functions make the log probabilities that requests ask for. synthetic:
        as of `accept.accept`."""
        self.groups, self._linear, self._sampler, self._logprobs_mode = groups, linear, sampler, logprobs_mode
        self.ranks, self.synthetic = ranks, synthetic

    def verify(
        self,
        batch: RoundBatch,
        logits: Tensor,
        metadata: Any,
        draws: tuple[SamplingParams, Tensor | None],
        states: list[Any],
        layers: Mapping[str, Any],
        step: DecodeStep | None = None,
    ) -> tuple[SamplerOutput, Accepted]:
        """Verify one tree per request; a request without drafts has a tree of one node.

        logits [n, V] are the target's in vLLM's order of rows; metadata is its ``SamplingMetadata``, draws what
        `RequestDraws` made of it, states its ``CachedRequestState`` of each request, layers the attention metadata of
        the forward by layer. step: what was captured, with the step begun.
        """
        device = logits.device
        follow_budgets(metadata, states)
        minimal, wanted = minimal_lengths(states), wants_logprobs(metadata)
        transforms = minimal or not keeps_logits(metadata)
        if metadata.all_greedy and not (len(batch.trees) or transforms or wanted):
            accepted = self.ranks.agree(plainly(self._sampler.greedy_sample(logits.float())))
            return SamplerOutput(sampled_token_ids=output_tokens(accepted), logprobs_tensors=None), accepted
        drafts = batch.all_drafts()
        plain = plain_requests(metadata, drafts.shape.max_accept_length)
        if step is not None and not (plain or transforms or wanted) and step.can_walk(metadata.all_greedy):
            accepted, tokens = step.walk(batch, logits, *draws)
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None), accepted
        drafts = roots_only(drafts, plain)
        raw, logits = logits, logits.float()
        if transforms:
            logits = logits.clone() if logits is raw else logits
            rows = node_rows(batch.b, batch.width, batch.logits_rows, len(logits), device)
            logits = transform_logits(metadata, drafts.tree, batch.roots, minimal, rows, logits)
        accepted = self.accept(batch, drafts, logits, draws, layers)
        logprobs = None
        if wanted:
            path = batch.logits_row_of(accepted_rows(accepted, batch.width)).view(-1)
            logprobs = output_logprobs(
                self._sampler, self._logprobs_mode, metadata, draws[0], raw[path], logits[path], accepted
            )
        return SamplerOutput(sampled_token_ids=output_tokens(accepted), logprobs_tensors=logprobs), accepted

    def accept(
        self,
        batch: RoundBatch,
        drafts: Drafts,
        logits: Tensor,
        draws: tuple[SamplingParams, Tensor | None],
        layers: Mapping[str, Any],
    ) -> Accepted:
        """Accept a path of each tree, and move its keys and values to the positions that they now have.

        drafts: of all requests; logits [n, V] float32 are the target's with everything applied but temperature and
        filters; draws and layers as of `verify`.
        """
        params, rng_keys = draws
        accepted = accept(drafts, batch.tree_logits(logits), params, rng_keys, batch.roots, "chained", self.synthetic)
        accepted = self.ranks.agree(accepted)
        if len(batch.trees):
            trees, lengths = batch.trees, batch.of_trees(batch.prefix_lens)
            of_trees = Accepted(*(batch.of_trees(values).contiguous() for values in accepted))
            for group in self.groups:
                group.move_accepted(trees, lengths, batch.width, of_trees, layers[group.layer].slot_table)
            self._linear.commit(layers, accepted)
        return accepted


def verifier_of(runner: Any) -> TreeVerifier:
    """Verifies the trees of a `TreeModelRunner`, whose caches must be there."""
    others, layers = runner.drafter._draft_attn_layer_names | runner.linear.names, runner.compilation_config
    groups = cache_groups(runner.kv_cache_config.kv_cache_groups, layers.static_forward_context, others)
    ranks = RankAgreement(get_tp_group(), runner.max_num_reqs, runner._caps.max_accept_length, runner.device)
    mode, synthetic = runner.model_config.logprobs_mode, synthetic_rates(runner.speculative_config)
    return TreeVerifier(groups, runner.linear, runner.sampler, mode, ranks, synthetic)


def plainly(tokens: Tensor) -> Accepted:
    """The paths of a step without trees: tokens [b] int64, one of each request."""
    lengths = torch.ones_like(tokens, dtype=torch.int32)
    return Accepted(torch.zeros_like(lengths)[:, None], lengths, tokens[:, None])


def roots_only(drafts: Drafts, requests: Sequence[int]) -> Drafts:
    """The drafts of a batch with nothing but the roots of these requests, which are served token by token."""
    if not len(requests):
        return drafts
    b, width = drafts.tree.tokens.shape
    sizes = torch.full((b,), width, device=drafts.tree.tokens.device)
    sizes[requests] = 1
    return drafts.truncate(sizes)
