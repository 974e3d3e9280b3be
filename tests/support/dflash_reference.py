"""What a DFlash or DSpark drafter lists, computed in plain torch from its files, one text after the other.

Keys and values of an accepted token are made of the target's states: fc of the outputs of some of its layers, a norm,
and the projections, norms and rotations of each layer of the drafter. The block is the root token and masks, at the
positions after them, and every row sees all of it, or with `is_causal` the rows up to its own; a mask's state gives
the logits of its own position. Where a DSpark drafter samples from its anchor, each row gives those of the next
position; its Markov head adds a bias after the token that is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_checkpoints import read_config
from torch import Tensor
from transformers import AutoModelForCausalLM


class DFlashReference:
    """A target and its drafter, both float32."""

    def __init__(self, target: Path, head: Path) -> None:
        self.config = read_config(head)
        self._target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self._w = load_file(str(head / "model.safetensors"))
        shared = {"embed_tokens.weight": self._target.get_input_embeddings(), "lm_head.weight": self._target.lm_head}
        for name, module in shared.items():
            self._w.setdefault(name, module.weight.detach())

    @torch.no_grad()
    def logits(self, text: list[int], rows: int) -> Tensor:
        """The logits [levels, draft vocabulary] after a text whose last token is the root, without the biases."""
        c, count = self.config, len(text) - 1
        options, first = c.get("dflash_config", c), 0 if c.get("sample_from_anchor") else 1
        states = self._target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in options["target_layer_ids"]], dim=-1)
        context = self._norm("hidden_norm", features @ self._w["fc.weight"].T)
        x = self._w["embed_tokens.weight"][[text[-1], *[options["mask_token_id"]] * (rows - 1)]]
        seen, block = torch.arange(count), torch.arange(count, count + rows)
        mask = torch.cat([seen, block]) <= block[:, None] if c.get("is_causal") else None  # else all see all
        for i in range(c["num_hidden_layers"]):
            layer = f"layers.{i}"
            rows_in = self._norm(f"{layer}.input_layernorm", x)
            q = self._rotated(self._heads(layer, "q", rows_in, "q_norm"), block)
            keys = self._heads(layer, "k", torch.cat([context, rows_in]), "k_norm")
            k = self._rotated(keys, torch.cat([seen, block]))
            v = self._heads(layer, "v", torch.cat([context, rows_in]))
            group = q.shape[1] // k.shape[1]
            k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
            out = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)), attn_mask=mask)
            x = x + out.transpose(0, 1).flatten(1) @ self._w[f"{layer}.self_attn.o_proj.weight"].T
            inner = self._norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (inner @ self._w[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self._w[f"{layer}.mlp.down_proj.weight"].T
        return self._norm("norm", x[first:]) @ self._w["lm_head.weight"].T

    def bias(self, token: int) -> Tensor:
        """What a Markov head adds to the logits [draft vocabulary] after a token of the target."""
        return self._w["markov_head.markov_w2.weight"] @ self._w["markov_head.markov_w1.weight"][token]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self._w[f"{name}.weight"]
        )

    def _heads(self, layer: str, part: str, x: Tensor, norm: str = "") -> Tensor:
        """[rows, heads, head_dim]."""
        projected = (x @ self._w[f"{layer}.self_attn.{part}_proj.weight"].T).view(len(x), -1, self.config["head_dim"])
        return self._norm(f"{layer}.self_attn.{norm}", projected) if norm else projected

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = (torch.cat([part, part], dim=-1)[:, None] for part in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
