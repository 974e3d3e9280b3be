"""Runs forwards of a target over dummy requests, in the blocks of the caches before a request uses them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context

from eagle_plugin.core.shape import Shape
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm.attention import Rows, TreeMetadata
from eagle_plugin.vllm.cache_layout import slot_table
from eagle_plugin.vllm.engine_graphs import EngineGraph
from eagle_plugin.vllm.latent_attention import LatentMetadata, latent_names
from eagle_plugin.vllm.linear_attention import LinearMetadata

SEED = 2026


class Places(NamedTuple):
    """Where the tokens of b dummy requests are, in one group of caches of one kind."""

    table: Tensor  # [b, S] int32: row of the cache of each position
    blocks: Tensor  # [b, blocks] int64
    layers: Sequence[str]
    latent: bool = False

    def as_metadata(self) -> SimpleNamespace:
        """What a captured step reads of a layer's metadata, whatever the layer keeps."""
        return SimpleNamespace(slot_table=self.table, slots=self.blocks[:, 0], left={})


class RandomInputs:
    """What dummy requests read, the same on every rank and in every call.

    Rows of different requests differ, as served ones do: a layer of experts sends equal rows to the same experts, and a
    forward over many rows would take as long as one over a single row.
    """

    def __init__(self, runner: Any) -> None:
        """runner: a `TreeModelRunner`."""
        self._device: torch.device = runner.device
        generator = torch.Generator().manual_seed(SEED)  # on the CPU: ranks on different GPUs have to draw the same
        self._ids = torch.randperm(runner.model_config.get_vocab_size(), generator=generator).to(self._device)

    def tokens(self, n: int) -> Tensor:
        """Ids of the target [n] int64, all different while there are so many."""
        return self._ids[torch.arange(n, device=self._device) % len(self._ids)]

    def drafts(self, b: int, shape: Shape) -> Drafts:
        """Trees [b, W] without an edge, of W tokens each."""
        tokens = self.tokens(b * shape.width).view(b, shape.width)
        plain = Drafts.plain(tokens[:, 0], shape.width)
        return Drafts(plain.tree._replace(tokens=tokens), shape)

    def states(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Hidden states of any shape."""
        generator = torch.Generator(self._device).manual_seed(SEED)
        return torch.randn(*shape, generator=generator, dtype=dtype, device=self._device)


def layer_metadata(runner: Any, groups: Sequence[Places], rows: Rows, owners: Tensor, slots: Tensor) -> dict[str, Any]:
    """What a forward of a `TreeModelRunner`'s target needs, by layer.

    owners [N] and slots [N] int64: request and position in its slots of each query row.
    """
    layers: dict[str, Any] = {}
    for table, blocks, names, latent in groups:
        attention = (LatentMetadata if latent else TreeMetadata)(rows, table, table[owners, slots].long())
        linear = LinearMetadata(rows, blocks[:, 0])
        layers |= {name: linear if name in runner.linear.names else attention for name in names}
    return layers


def places_of(runner: Any, owned: Sequence[Tensor], positions: int) -> list[Places]:
    """The places of each group of caches, of requests that own these blocks: [b, blocks] int64 for each group.

    A group has its latent layers apart: vLLM's layer wants metadata of its own kind.
    """
    found, latent = [], latent_names(runner.compilation_config.static_forward_context)
    for group, blocks in zip(runner.kv_cache_config.kv_cache_groups, owned, strict=True):
        table = slot_table(blocks, group.kv_cache_spec.block_size, positions)
        if own := [name for name in group.layer_names if name in latent]:
            found.append(Places(table, blocks, own, latent=True))
        if others := [name for name in group.layer_names if name not in latent]:
            found.append(Places(table, blocks, others))
    return found


def target_states(runner: Any, layers: dict[str, Any], tokens: Tensor, positions: Tensor) -> tuple[Tensor, Any]:
    """One forward of the target over N rows: its states [N, H], and those that the head reads, or None."""
    return _split(runner, forward(runner, layers, tokens.int(), positions))


def served_states(runner: Any, layers: dict[str, Any], tokens: Tensor, positions: Tensor, b: int) -> tuple[Tensor, Any]:
    """As `target_states`, of b requests with as many rows each: run as the engine runs such a step where we have
    captured nothing for it, by a graph of its own if it has one for so many rows.

    Its graphs read the memory of the runner's query rows.
    """
    n, graph = len(tokens), runner.engine_graph(b, len(tokens) // b)
    ids, places = runner.query_rows()[0][: graph.rows], runner.rotary_rows()[..., : graph.rows]
    for memory, values in ((ids, tokens), (places, positions)):
        memory[..., :n] = values
        memory[..., n:] = 0  # of padding
    hidden, aux = _split(runner, forward(runner, layers, ids, places, graph))
    return hidden[:n], None if aux is None else [states[:n] for states in aux]


def forward(
    runner: Any, layers: dict[str, Any], tokens: Tensor, positions: Tensor, graph: EngineGraph | None = None
) -> Any:
    """One forward of the target over N rows of text: what it returns.

    tokens [N] int32; positions [N], or [axes, N] as its rotary embedding reads them. graph: None: run without a graph
    of the engine; else the rows are its rows.
    """
    inputs: dict[str, Any] = {"input_ids": tokens, "positions": positions}
    if runner.model_config.uses_mrope and positions.ndim == 1:
        axes = runner.rotary_rows()[:, : len(positions)]  # with the strides for which the target is compiled
        inputs["positions"] = axes.copy_(positions)
    if runner.supports_mm_inputs:  # the engine gives such a target embeddings for every row
        embeddings = runner.model.embed_input_ids(tokens)
        inputs["inputs_embeds"] = embeddings
        if graph is not None:
            inputs["inputs_embeds"] = runner.embedding_rows(len(tokens)).copy_(embeddings)
        if not runner.model.requires_raw_input_tokens:
            inputs["input_ids"] = None
    # vLLM itself stores what latent layers keep.
    slots = {name: of.slots for name, of in layers.items() if isinstance(of, LatentMetadata)}
    context = {} if graph is None else graph.context
    with set_forward_context(layers, runner.vllm_config, num_tokens=len(tokens), slot_mapping=slots, **context):
        return runner._model_forward(**inputs)


def _split(runner: Any, output: Any) -> tuple[Tensor, Any]:
    return output if runner.use_aux_hidden_state_outputs else (output, None)
