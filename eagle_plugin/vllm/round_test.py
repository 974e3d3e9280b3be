"""Tests the real round before the first request: trees and prompts in one forward of the real target against the same
tokens one by one, and what the target says after an accepted path whose keys and values were moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.runtime.round import TreeRows
from eagle_plugin.selftest.failure import without_memory
from eagle_plugin.selftest.tree_paths import Pairs, allowed_difference, along, logits_differ, paths_of, random_tree
from eagle_plugin.vllm.attention import ExtendRows, Rows
from eagle_plugin.vllm.dummy_batches import layer_metadata, places_of, target_states
from eagle_plugin.vllm.graph_test import GraphTest
from eagle_plugin.vllm.ranks import blocks_in_every_rank

SEED = 2026
REQUESTS = 4
PREFIX = 6  # tokens before a tree: few, so that what a node sees of its tree counts
PROMPT = 70  # tokens of a prompt: more than a part of it that is attended to as one chain


class RoundTest:
    """Runs a `TreeModelRunner`'s target in blocks of random order, with the same tokens on every rank."""

    def __init__(self, runner: Any) -> None:
        """runner: its caches are allocated, and it has no request."""
        self._runner, self._caps = runner, runner._caps
        self._device = runner.device
        self._allowed = allowed_difference(runner.dtype, runner.model_config.quantization)
        self._vocabulary: int = runner.model_config.get_vocab_size()
        self._generator = torch.Generator().manual_seed(SEED)
        self._blocks = blocks_in_every_rank(runner)
        self._sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]

    @torch.inference_mode()
    def run(self) -> list[str]:
        """One sentence per thing that differs."""
        parts = (self.prompts_against_tokens, self.trees_against_paths, self.graphs_against_eager)
        return [reason for part in parts for reason in without_memory(part)]

    def graphs_against_eager(self) -> list[str]:
        """What was captured of a step; nothing where there are no graphs."""
        step = self._runner._step
        if step is None:
            return []
        return GraphTest(self._runner, self._blocks_for, self._generator).run()

    def prompts_against_tokens(self) -> list[str]:
        """The logits after every token of a prompt."""
        longest = min(PROMPT, self._runner.max_num_tokens, self._runner.max_model_len - 1)
        while longest > 1 and not self._blocks_for(1, longest):
            longest //= 2
        self._own(1, longest)
        tokens = self._random(1, longest)
        at_once = self._prompt(tokens)
        pairs = [(at_once[:, i], self._one_token(tokens[:, i], i)) for i in range(longest)]
        return logits_differ("a prompt in one forward of the target", pairs, self._allowed)

    def trees_against_paths(self) -> list[str]:
        """The logits after every node of some paths, and after a token that follows each path."""
        caps, runner = self._caps, self._runner
        prefix = min(PREFIX, runner.max_model_len - caps.reach)
        if prefix < 1:  # a request never has room for a whole tree
            return []
        b = min(REQUESTS, runner.max_num_reqs, runner.max_num_tokens // max(caps.width, prefix))
        while b > 1 and not self._blocks_for(b, prefix + caps.reach):
            b //= 2
        self._own(b, prefix + caps.reach)
        prompt, roots, after = self._random(b, prefix), self._random(b), self._random(b)
        tree = random_tree(roots, caps, self._vocabulary, self._generator)
        nodes_of_paths: Pairs = []
        after_paths: Pairs = []  # apart: of a deep tree they would be few among the others
        for path in paths_of(tree.parents[0].tolist()):
            self._prompt(prompt)
            nodes = self._tree(tree, prefix)
            moved = self._accept(path, prefix)
            next_at_once = self._one_token(after, moved)
            self._prompt(prompt)
            nodes_of_paths += along(path, tree, nodes, lambda tokens, depth: self._one_token(tokens, prefix + depth))
            after_paths.append((next_at_once, self._one_token(after, moved)))
        return [
            *logits_differ("a tree in one forward of the target", nodes_of_paths, self._allowed),
            *logits_differ("a token after an accepted path", after_paths, self._allowed),
        ]

    # --- blocks

    def _blocks_for(self, b: int, positions: int) -> list[Tensor] | None:
        """Blocks [b, n] for each group of caches, no block twice: groups share their memory. None: not enough."""
        counts = [b * -(-positions // size) for size in self._sizes]
        free = 1 + torch.randperm(self._blocks - 1, generator=self._generator)
        if sum(counts) > len(free):
            return None
        parts = free[: sum(counts)].to(self._device).split(counts)
        return [part.view(b, -1) for part in parts]

    def _own(self, b: int, positions: int) -> None:
        blocks = self._blocks_for(b, positions)
        if blocks is None:
            raise RuntimeError(f"the KV cache has no room for {b} requests of {positions} tokens: give the server more")
        self._groups = places_of(self._runner, blocks, positions)
        self._requests = torch.arange(b, device=self._device)

    # --- forwards; each writes its keys and values

    def _prompt(self, tokens: Tensor) -> Tensor:
        """The logits [b, n, V] after tokens [b, n], the first ones of their requests."""
        b, n = tokens.shape
        lens = torch.full_like(self._requests, n)
        rows = Rows(ExtendRows(self._requests, lens, lens, self._requests * n), None, extend_lens=[n] * b)
        slots = torch.arange(n, device=self._device).expand(b, n)
        return self._logits(rows, tokens, slots, slots)

    def _one_token(self, tokens: Tensor, length: int) -> Tensor:
        """The logits [b, V] after tokens [b] at this position."""
        b = len(tokens)
        lens = torch.ones_like(self._requests)
        rows = Rows(ExtendRows(self._requests, lens + length, lens, self._requests), None, extend_lens=[1] * b)
        slots = torch.full_like(tokens, length)[:, None]
        return self._logits(rows, tokens[:, None], slots, slots)[:, 0]

    def _tree(self, tree: DraftTree, prefix: int) -> Tensor:
        """The logits [b, W, V] after the nodes of trees that come after `prefix` tokens."""
        width = tree.tokens.shape[1]
        lengths = torch.full_like(self._requests, prefix)
        rows = Rows(None, TreeRows(self._requests, lengths, tree.ancestors, width))
        slots = prefix + torch.arange(width, device=self._device).expand_as(tree.tokens)
        return self._logits(rows, tree.tokens, slots, prefix + tree.depths)

    def _accept(self, path: list[int], prefix: int) -> int:
        """Accept these nodes of the trees of the last forward in every request; the length of the requests then."""
        b, longest = len(self._requests), self._caps.max_accept_length
        index = torch.full((b, longest), -1, dtype=torch.int32, device=self._device)
        index[:, : len(path)] = torch.tensor(path, dtype=torch.int32, device=self._device)
        lengths = torch.full((b,), len(path), dtype=torch.int32, device=self._device)
        accepted = Accepted(index, lengths, torch.zeros_like(index, dtype=torch.int64))
        slots = prefix + torch.arange(self._caps.width, device=self._device)
        for group in self._runner._verifier.groups:
            group.caches.move_accepted(self._layers[group.layer].slot_table[:, slots].long(), accepted)
        self._runner.linear.commit(self._layers, accepted)
        return prefix + len(path)

    def _logits(self, rows: Rows, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        b, n = tokens.shape
        runner, per_request = self._runner, np.full(b, n, dtype=np.int32)
        owners = self._requests.repeat_interleave(n)
        self._layers = layer_metadata(runner, self._groups, rows, owners, slots.reshape(-1))
        with runner.maybe_select_dummy_loras(runner.lora_config, per_request, num_sampled_tokens=per_request):
            hidden, _ = target_states(runner, self._layers, tokens.reshape(-1), positions.reshape(-1).long())
            return runner.model.compute_logits(hidden[: b * n]).float().view(b, n, -1)

    def _random(self, *shape: int) -> Tensor:
        return torch.randint(0, self._vocabulary, shape, generator=self._generator).to(self._device)
