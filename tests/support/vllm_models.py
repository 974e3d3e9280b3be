"""A target and its draft head in vLLM's own model runner on the CPU, driven without an engine around it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from eagle_plugin.heads.draft_head import DraftHead
from eagle_plugin.heads.kinds import find_spec

CPU = torch.device("cpu")
OF_VLLM = mock.patch.dict(os.environ, EAGLE_PLUGIN="0")  # what is tested is vLLM's own: configuration and classes


@OF_VLLM
def make_config(target: Path, head: Path, method: str, *, parallel: bool = False) -> VllmConfig:
    """What vLLM makes of `--speculative-config` for these two folders; raises where it refuses to start."""
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 4}
    if parallel:
        speculative["parallel_drafting"] = True
    arguments = EngineArgs(
        model=str(target),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        enforce_eager=True,
        speculative_config=speculative,
    )
    return arguments.create_engine_config()


class Served:
    """vLLM's target and draft modules as a worker loads them, with a KV cache of one block for one sequence."""

    @OF_VLLM
    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
                init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            destroy_model_parallel()  # the groups depend on the target: experts have one of their own
            initialize_model_parallel()
            self.runner = CPUModelRunner(config, CPU)
            self.runner.load_model()
        self.target, self.drafter = self.runner.model, self.runner.drafter
        self.draft = self.drafter.model
        context = config.compilation_config.static_forward_context.items()  # experts are in it too
        self.layers = {name: layer for name, layer in context if isinstance(layer, AttentionLayerBase)}
        self.specs = {name: layer.get_kv_cache_spec(config) for name, layer in self.layers.items()}
        for name, spec in self.specs.items():
            self.layers[name].kv_cache = torch.zeros(2, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers whose input the target hands out."""
        return tuple(getattr(self.target.model, "aux_hidden_state_layers", ()))

    @contextmanager
    def attention(self, start: int, rows: int) -> Iterator[None]:
        """A forward of `rows` tokens after `start` tokens that are in the KV cache, through the real CPU attention."""
        slots = torch.arange(start, start + rows)
        bounds = torch.tensor([0, rows], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.tensor([start + rows], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=rows,
            max_query_len=rows,
            max_seq_len=start + rows,
            block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=slots,
        )
        with set_current_vllm_config(self.config), torch.inference_mode():
            metadata = {}
            for name, spec in self.specs.items():
                builder = self.layers[name].get_attn_backend().get_builder_cls()
                metadata[name] = builder(spec, [name], self.config, CPU).build(0, common)
            mapping = dict.fromkeys(self.layers, slots)
            with set_forward_context(metadata, self.config, num_tokens=rows, slot_mapping=mapping):
                yield

    def read(self, tokens: Tensor) -> Tensor:
        """tokens [n] -> what the target hands the drafter: aux states [n, A*H], or the last states [n, H]."""
        with self.attention(0, len(tokens)):
            out = self.target(tokens, torch.arange(len(tokens)))
        return torch.cat(list(out[1]), -1) if self.aux_layers else out

    def fuse(self, features: Tensor) -> Tensor:
        """Features [n, F] -> hidden states [n, H] as the proposer makes them."""
        with torch.inference_mode():
            return self.draft.combine_hidden_states(features) if self.aux_layers else features

    def step(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """One pass of the head on n tokens and hidden [n, H] -> logits [n, V] over all tokens, states [n, H]."""
        with self.attention(start, len(tokens)):
            normed, state = self.draft(tokens, torch.arange(start, start + len(tokens)), hidden)
            return self.draft.compute_logits(normed), state


def load(target: Path, folder: Path, head: DraftHead) -> Served:
    spec = find_spec(head.kind)
    return Served(make_config(target, folder, spec.method, parallel=spec.levels.depth_is_free))
