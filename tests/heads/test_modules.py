"""The head modules: against transformers' own layers, against themselves as trees, and the Markov heads' arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from reference_decoder import served_head
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.load import load_any_head


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def target_weights(target: Path) -> tuple[Tensor, Tensor]:
    weights = load_file(target / "model.safetensors")
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def llama_layer(folder: Path, prefix: str, width: int) -> tuple[LlamaDecoderLayer, LlamaRotaryEmbedding]:
    """transformers' own layer with the head's weights; its input norm is left to the caller."""
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer.self_attn, name, nn.Linear(width, getattr(layer.self_attn, name).out_features, bias=False))
    layer.input_layernorm = nn.Identity()
    weights = load_file(folder / "model.safetensors")
    own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})
    return layer, LlamaRotaryEmbedding(config)


def additive(n: int) -> Tensor:
    return torch.zeros(1, 1, n, n).masked_fill(~causal(n), -torch.inf)


@torch.no_grad()
def test_eagle2_equals_a_transformers_layer(tiny_eagle2: Path, tiny_target: Path) -> None:
    embedding, lm_head = target_weights(tiny_target)
    head = load_any_head(tiny_eagle2, tiny_target)
    n = 9
    tokens, features, positions = torch.randint(512, (n,)), torch.randn(n, 64), torch.arange(5, 5 + n)
    weights = load_file(tiny_eagle2 / "model.safetensors")
    x = (torch.cat([embedding[tokens], features], -1) @ weights["fc.weight"].T + weights["fc.bias"])[None]
    layer, rotary = llama_layer(tiny_eagle2, "layers.0.", 64)
    expected = layer(x, attention_mask=additive(n), position_embeddings=rotary(x, positions[None]))
    state, _ = head(head.embed(tokens), head.fuse(features), positions, causal(n))
    torch.testing.assert_close(state, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(state), expected[0] @ lm_head.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_eagle3_equals_a_transformers_attention(tiny_eagle3: Path, tiny_target: Path) -> None:
    embedding, _ = target_weights(tiny_target)
    head = load_any_head(tiny_eagle3, tiny_target)
    n = 9
    tokens, features, positions = torch.randint(512, (n,)), torch.randn(n, 192), torch.arange(5, 5 + n)
    weights = load_file(tiny_eagle3 / "model.safetensors")
    layer, rotary = llama_layer(tiny_eagle3, "midlayer.", 128)
    norm = LlamaRMSNorm(64, head.config.rms_norm_eps)  # every norm of the tiny head has weight one
    h = features @ weights["fc.weight"].T
    y = torch.cat([norm(embedding[tokens]), norm(h)], -1)[None]
    attended, _ = layer.self_attn(y, attention_mask=additive(n), position_embeddings=rotary(y, positions[None]))
    r = h + attended[0]
    expected = r + layer.mlp(norm(r))
    state, _ = head(head.embed(tokens), head.fuse(features), positions, causal(n))
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(state), norm(expected) @ weights["lm_head.weight"].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
@torch.no_grad()
def test_tree_node_equals_its_own_chain(kind: str, tiny_eagle2: Path, tiny_eagle3: Path, tiny_target: Path) -> None:
    """A node of a tree has the result that it has at the end of a sequence of its own path alone."""
    head = load_any_head(tiny_eagle2 if kind == "EAGLE" else tiny_eagle3, tiny_target)
    prefix, paths = 6, [[0], [1], [0, 2], [1, 3], [0, 2, 4], [1, 3, 5]]  # two interleaved chains of nodes 0..5
    tokens, hidden = torch.randint(512, (prefix + 6,)), torch.randn(prefix + 6, 64)
    visible = torch.zeros(prefix + 6, prefix + 6, dtype=torch.bool)
    visible[:prefix, :prefix] = causal(prefix)
    visible[prefix:, :prefix] = True
    for node, path in enumerate(paths):
        visible[prefix + node, [prefix + p for p in path]] = True
    depths = torch.tensor([len(path) for path in paths])
    positions = torch.cat([torch.arange(prefix), prefix + depths - 1])

    at = slice(0, prefix)
    _, past = head(head.embed(tokens[at]), hidden[at], positions[at], visible[at, at])
    states = []
    for level in ((0, 1), (2, 3), (4, 5)):
        at = slice(prefix + level[0], prefix + level[1] + 1)
        state, past = head(head.embed(tokens[at]), hidden[at], positions[at], visible[at, : at.stop], past)
        states.extend(state)
    for node, path in enumerate(paths):
        rows = [*range(prefix), *(prefix + p for p in path)]
        alone, _ = head(head.embed(tokens[rows]), hidden[rows], torch.arange(len(rows)), causal(len(rows)))
        torch.testing.assert_close(states[node], alone[-1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_batch_dimensions(tiny_eagle3: Path, tiny_target: Path) -> None:
    head = load_any_head(tiny_eagle3, tiny_target)
    tokens, features, positions = torch.randint(512, (2, 3, 7)), torch.randn(2, 3, 7, 192), torch.arange(7)
    state, past = head(head.embed(tokens), head.fuse(features), positions.expand(2, 3, 7), causal(7).expand(2, 3, 7, 7))
    one, _ = head(head.embed(tokens[1, 2]), head.fuse(features[1, 2]), positions, causal(7))
    assert past[0].keys.shape == (2, 3, 7, 2, 16)
    torch.testing.assert_close(state[1, 2], one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "EAGLE3 reduced"])
@torch.no_grad()
def test_markov_heads_draft_right(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A chain of 5 drafts follows f, each with a probability close to one."""
    target = tiny_models.markov_target(tmp_path / "target", dtype=dtype)
    embedding, _ = target_weights(target)
    following = tiny_models.read_markov_map(target)
    path = [int(following[0])]
    for _ in range(9):
        path.append(int(following[path[-1]]))
    sequence = torch.tensor(path)
    if kind == "EAGLE":
        folder = tiny_models.markov_eagle2_head(tmp_path / "head", target, dtype=dtype)
        features = nn.functional.rms_norm(embedding[sequence[:3]], (len(embedding),))
    else:
        reduced = kind.endswith("reduced")
        folder = tiny_models.markov_eagle3_head(tmp_path / "head", target, reduced=reduced, dtype=dtype)
        features = torch.cat([embedding[sequence[:3]]] * 3, -1)
    head = load_any_head(folder, target)
    # rows 0..2 take tokens 1..3; the chain then drafts tokens 4..8
    state, past = head(head.embed(sequence[1:4]), head.fuse(features), torch.arange(3), causal(3))
    drafted = []
    for step in range(5):
        probability, best = head.logits(state[-1:]).float().softmax(-1).max(-1)
        assert probability > 0.999
        token = head.to_target(best)
        drafted.append(int(token))
        visible = torch.ones(1, 4 + step, dtype=torch.bool)
        state, past = head(head.embed(token), state[-1:], torch.tensor([3 + step]), visible, past)
    assert drafted == path[4:9]


@pytest.mark.parametrize("norm", ["fc_norm", "norm_before_fc"])
@torch.no_grad()
def test_norms_before_fc(norm: str, tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config = json.loads((folder / "config.json").read_text()) | {norm: True}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    gains = torch.rand(3, 64) + 0.5
    if norm == "fc_norm":
        weights |= {f"fc_norm.{i}.weight": gains[i].clone() for i in range(3)}
    else:
        weights["input_norm.weight"] = gains.flatten()
    save_file(weights, folder / "model.safetensors")
    head = load_any_head(folder, tiny_target)
    features = torch.randn(5, 192) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(64)
    size = 64 if norm == "fc_norm" else 192
    parts = features.unflatten(-1, (-1, size))
    normed = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gains.flatten().view(-1, size)
    torch.testing.assert_close(head.fuse(features), normed.flatten(-2) @ weights["fc.weight"].T)


@torch.no_grad()
def test_norm_output_hands_on_the_normed_state(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    config = json.loads((folder / "config.json").read_text()) | {"norm_output": True}
    (folder / "config.json").write_text(json.dumps(config))
    plain, normed = served_head(tiny_target, tiny_eagle3), served_head(tiny_target, folder)
    rows = plain.embed(torch.randint(512, (4,))), torch.randn(4, 64), torch.arange(4), causal(4)
    state, out = plain(*rows)[0], normed(*rows)[0]
    torch.testing.assert_close(out, nn.functional.rms_norm(state, (64,), eps=1e-5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normed.logits(out), plain.logits(state), rtol=1e-5, atol=1e-5)


def test_the_embedding_is_not_trained(tiny_eagle3: Path, tiny_target: Path) -> None:
    head = load_any_head(tiny_eagle3, tiny_target)
    assert {name for name, p in head.named_parameters() if p.requires_grad} == set(head.state_dict()) - {
        "embedding",
        "d2t",
    }


def test_inverse_frequencies_keep_their_precision(tiny_eagle3: Path, tiny_target: Path) -> None:
    head = load_any_head(tiny_eagle3, tiny_target, torch.bfloat16).to(torch.bfloat16)
    exact = LlamaRotaryEmbedding(head.config)(torch.zeros(1), torch.tensor([[2000]]))[0]
    torch.testing.assert_close(head.layers[0].self_attn.rotary(torch.zeros(1), torch.tensor([[2000]]))[0], exact)


def test_missing_tensor_is_named(tiny_eagle3: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(tiny_eagle3, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(HeadError, match="norm.weight"):
        load_any_head(folder, tiny_target)
