"""Verifies a draft tree: one forward of the target, the walk, the move of the accepted keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from eagle_plugin.core.synthetic import SyntheticRates
from eagle_plugin.core.tree import DraftTree
from eagle_plugin.core.verify import Accepted
from eagle_plugin.kernels.tree import sibling_links
from eagle_plugin.runtime.accept import accept, accepted_rows
from eagle_plugin.runtime.round import Drafts, TreeRows
from eagle_plugin.sglang.attention import TreeAttention
from eagle_plugin.sglang.batch import RoundBatch
from eagle_plugin.sglang.features import LastStates
from eagle_plugin.sglang.forward import TreeForward
from eagle_plugin.sglang.linear_attention import LinearLayers, LinearTrees, linear_layers
from eagle_plugin.sglang.logits import transform_logits
from eagle_plugin.sglang.penalties import NodePenalties
from eagle_plugin.sglang.pools import SlidingRows, pools_of


@dataclass
class TreeVerifyInput(EagleVerifyInput):
    """The engine's verify input without its masks and links: our attention reads ancestor bitmasks."""

    tree_rows: TreeRows | None = None
    slot_table: Tensor | None = None
    sliding_rows: SlidingRows | None = None
    linear_trees: LinearTrees | None = None


class TargetOutput(NamedTuple):
    """What the target gives after every node of B trees."""

    logits: Tensor  # [B * W, V] float32
    features: Tensor  # [B * W, H of the features that the head reads]
    linear: LinearTrees | None = None  # of a target with layers that keep a state
    last: Tensor | None = None  # [B * W, H]: what the output layer reads, where states are stored

    def first(self, rows: int) -> TargetOutput:
        """The same of the first nodes alone: views."""
        last = None if self.last is None else self.last[:rows]
        return self._replace(logits=self.logits[:rows], features=self.features[:rows], last=last)


class TreeVerifier:
    """Verification against one target worker of SGLang (``TpModelWorker``)."""

    def __init__(
        self,
        target_worker: Any,
        attention: TreeAttention,
        rows: int,
        allocator: Any,
        synthetic: SyntheticRates | None = None,
        replicas: int = 1,
        last: LastStates | None = None,
    ) -> None:
        """attention serves the target; rows: of the engine's request table; synthetic: as of `accept.accept`; replicas:
        as of `TreeForward`; last: where states are stored."""
        self._last = last
        runner = target_worker.model_runner
        self.penalties = NodePenalties(rows, runner.model_config.vocab_size, runner.device)
        self._synthetic = synthetic
        self._forward = TreeForward(runner, attention, replicas)
        self._caches = [pool.caches() for pool in pools_of(allocator.get_kvcache())]
        linear = linear_layers(runner.model)
        self._linear = LinearLayers(runner.req_to_token_pool, linear) if linear else None

    def forward(self, batch: RoundBatch, tree: DraftTree, logits_buffer: Tensor | None = None) -> TargetOutput:
        """Run the target over trees [B, W]; logits_buffer [B * W, V] float32, if given, receives the logits."""
        steps, topk, width = batch.shape
        window = batch.window(0, width).view(-1)
        positions = (batch.prefix_lens[:, None] + tree.depths).view(-1)
        tokens = tree.tokens.view(-1)
        linear = None if self._linear is None else self._linear.begin(batch.requests, tree.ancestors)
        info = TreeVerifyInput(
            draft_token=tokens,
            custom_mask=None,
            positions=positions,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=steps,
            topk=topk,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            tree_rows=batch.tree_rows(tree.ancestors, width),
            slot_table=batch.start.table,
            sliding_rows=batch.sliding,
            linear_trees=linear,
        )
        output = self._forward(
            batch,
            mode=ForwardMode.TARGET_VERIFY,
            hidden=CaptureHiddenMode.FULL,
            tokens=tokens,
            positions=positions,
            slots=window,
            info=info,
            logits_buffer=logits_buffer,
        )
        last = None if self._last is None else self._last.take()
        return TargetOutput(output.next_token_logits, output.hidden_states, linear, last)

    def walk(self, batch: RoundBatch, drafts: Drafts, logits: Tensor) -> Accepted:
        """Accept a path of each tree by the logits [b * W, V] after its nodes, of b requests or B."""
        b = len(drafts.tree.tokens)
        sampling = type(batch.sampling)(*(values[:b] for values in batch.sampling))
        rng_keys = None if batch.is_greedy else batch.rng_keys[:b]
        return accept(drafts, logits, sampling, rng_keys, batch.prefix_lens[:b], "joint", self._synthetic)

    def walk_with_transforms(
        self,
        batch: RoundBatch,
        schedule_batch: Any,
        drafts: Drafts,
        logits: Tensor,
        grammar_tree: GrammarTree | None,
        grammar_barrier: Any,
    ) -> Accepted:
        """As `walk`, for the b requests of a batch that ask for more than temperature and filters."""
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=schedule_batch.reqs,
                tree=grammar_tree,
                sampling_info=schedule_batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        transform_logits(batch, schedule_batch, drafts.tree, logits, self.penalties, grammar_mask)
        return self.walk(batch, drafts, logits)

    def commit_states(self, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the states after the accepted paths, of layers that have states."""
        if self._linear is not None:
            assert output.linear is not None
            self._linear.commit(output.linear, accepted)

    def commit(self, batch: RoundBatch, accepted: Accepted, output: TargetOutput) -> None:
        """Move the keys and values of the accepted paths, and keep the states after them."""
        self.commit_states(accepted, output)
        windows = [batch.window(0, batch.shape.width)]
        if batch.sliding is not None:
            windows.append(batch.sliding.slots[:, : batch.shape.width].contiguous())
        for caches, window in zip(self._caches, windows, strict=True):
            caches.move_accepted(window, accepted)


def grammar_tree(tree: DraftTree) -> GrammarTree:
    """The copy of trees [b, W] for the host, to be made before the target's forward: it is read while that runs."""
    return GrammarTree.from_device(*sibling_links(tree.parents), tree.tokens)


def log_probabilities(schedule_batch: Any, logits: Tensor, accepted: Accepted, width: int) -> LogitsProcessorOutput:
    """An output with the log probabilities of the accepted tokens, by the transformed logits [b * W, V]."""
    output = LogitsProcessorOutput(next_token_logits=logits)
    path = accepted_rows(accepted, width)
    compute_spec_logprobs(schedule_batch, output, _next_tokens(accepted, width), accept_index=path)
    return output


def _next_tokens(accepted: Accepted, width: int) -> Tensor:
    """The token that follows each node of the accepted paths, [b * W] int64; of other nodes 0."""
    node = accepted.index.long()
    # Places without a node go to the last column.
    tokens = torch.zeros(len(node), width + 1, dtype=torch.int64, device=node.device)
    return tokens.scatter_(1, node.where(node >= 0, width), accepted.tokens)[:, :width].reshape(-1)
