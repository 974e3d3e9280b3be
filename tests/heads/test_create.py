"""new_head: the shape of a head follows from its target, and its weights start where they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import write_target
from trained_heads import trained_head

from eagle_plugin.heads.create import new_head
from eagle_plugin.heads.eagle3 import Eagle3Head
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.kinds import find_spec
from eagle_plugin.heads.mask_token import mask_token_candidates
from eagle_plugin.heads.new_config import new_head_config, read_rope
from eagle_plugin.heads.peagle import PEagleHead
from eagle_plugin.heads.target_files import TargetFiles


def altered(target: Path, folder: Path, **keys: Any) -> Path:
    """The same target with other keys in config.json; ... removes one."""
    folder.mkdir()
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(target / file)
    config = json.loads((target / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "peagle"])
def test_what_is_trained(kind: Any, tiny_target: Path) -> None:
    head = new_head(kind, tiny_target, mask_token_id=3)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    assert frozen == ({"fc.bias"} if kind == "eagle2" else set())
    assert not {"embedding", "d2t"} & {name for name, _ in head.named_parameters()}
    assert head.kind == kind


def test_start_from_the_target(tiny_target: Path) -> None:
    ids = torch.arange(10, 138)
    head = new_head("eagle3", tiny_target, ids)
    assert isinstance(head, Eagle3Head)
    target = load_file(tiny_target / "model.safetensors")
    assert torch.equal(head.lm_head.weight, target["lm_head.weight"][ids])
    assert torch.equal(head.to_target(torch.arange(128)), ids)
    own = dict(head.named_parameters())
    q = target["model.layers.6.self_attn.q_proj.weight"]
    assert torch.equal(own["layers.0.self_attn.q_proj.weight"][:, 64:], q)
    assert own["layers.0.self_attn.q_proj.weight"][:, :64].std() < 0.03
    assert torch.equal(own["fc.weight"][:, 128:], torch.eye(64))
    assert torch.equal(own["layers.0.mlp.up_proj.weight"], target["model.layers.6.mlp.up_proj.weight"])
    again, random = new_head("eagle3", tiny_target, ids), new_head("eagle3", tiny_target, ids, init="random")
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert not torch.equal(random.fc.weight[:, 128:], torch.eye(64))


@pytest.mark.parametrize("norms", ["3.0", "3.1", "before_fc", "before_fc_output"])
@pytest.mark.parametrize("hidden", [576, 4096])
@torch.no_grad()
def test_a_new_head_starts_from_the_last_state(hidden: int, norms: Any, tmp_path: Path) -> None:
    """Nothing that is drawn hides it, however wide the target is, and extra layers pass it on."""
    sizes = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    target = write_target(tmp_path / "target", hidden_size=hidden, vocab_size=128, **sizes)
    shape = {"intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    head = new_head("eagle3", target, norms=norms, layers=2, **shape)
    assert isinstance(head, Eagle3Head)
    generator = torch.Generator().manual_seed(0)
    states = [scale * torch.randn(9, hidden, generator=generator) for scale in (1.0, 5.0, 21.0)]
    fused = head.fuse(torch.cat(states, -1))
    assert torch.cosine_similarity(fused, states[-1], -1).min() > 0.9
    if norms != "3.0":  # where the first layer has the target's matrices, for states of the target's scale
        embeds, positions = head.embed(torch.arange(9)), torch.arange(9)
        state, _ = head(embeds, fused, positions, torch.ones(9, 9, dtype=torch.bool).tril())
        assert torch.cosine_similarity(state / head.norm.weight if head.norm_output else state, fused, -1).min() > 0.999


def test_norms_that_add_one(tiny_target: Path, tmp_path: Path) -> None:
    """A Gemma norm of weight w multiplies by 1 + w, the head's by its weight."""
    plain = new_head("eagle3", tiny_target)
    folder = altered(tiny_target, tmp_path / "gemma", model_type="gemma3_text")
    gemma = new_head("eagle3", folder)
    assert isinstance(plain, Eagle3Head) and isinstance(gemma, Eagle3Head)
    torch.testing.assert_close(gemma.norm.weight, plain.norm.weight + 1)


def test_multimodal_wrapper(tiny_target: Path, tmp_path: Path) -> None:
    inner = json.loads((tiny_target / "config.json").read_text())
    folder = tmp_path / "wrapper"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Wrapper"], "text_config": inner}))
    weights = load_file(tiny_target / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed | {"vision.embed_tokens.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    bare, wrapped = new_head("eagle3", tiny_target), new_head("eagle3", folder)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), wrapped.parameters(), strict=True))


def test_auto(tiny_target: Path, tmp_path: Path) -> None:
    names = {"Qwen3ForCausalLM": "eagle3", "Gemma3ForCausalLM": "eagle2", "Qwen3NextForCausalLM": "eagle2"}
    names["SomethingElse"] = "eagle2"
    for name, kind in names.items():
        folder = altered(tiny_target, tmp_path / name, architectures=[name])
        assert new_head("auto", folder).kind == kind
    assert new_head("eagle3", tmp_path / "Qwen3NextForCausalLM").kind == "eagle3"


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "old spelling": ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
    "llama3": (
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "one a layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    ),
    "multimodal": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        {"rope_type": "default", "rope_theta": 1e7},
    ),
    "yarn": (
        {"rope_theta": 1.5e5, "rope_scaling": {"type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0}},
        {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0},
    ),
}


@pytest.mark.parametrize("case", ROPES)
def test_rope(case: str) -> None:
    config, wanted = ROPES[case]
    assert read_rope(config) == wanted


SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "its own": ({}, (4, 2, 16, 128)),
    "head size apart": ({"head_dim": 128}, (4, 2, 128, 128)),
    "experts": ({"intermediate_size": 32}, (4, 2, 16, 256)),
    "latent attention": ({"kv_lora_rank": 512, "num_key_value_heads": 128, "head_dim": ...}, (1, 1, 64, 128)),
    "wide heads": ({"head_dim": 256}, (1, 1, 64, 128)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shape(case: str, tiny_target: Path, tmp_path: Path) -> None:
    keys, wanted = SHAPES[case]
    target = TargetFiles(altered(tiny_target, tmp_path / "target", **keys))
    options = dict.fromkeys(("intermediate_size", "num_heads", "num_kv_heads", "head_dim"))
    shape = new_head_config(find_spec("eagle3"), target, layers=1, **options)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert tuple(shape[name] for name in names) == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "aux order": ({"aux_layers": (4, 2, 6)}, r"aux layers are \[4, 2, 6\], wanted rising ids from 1 to 6"),
    "aux too high": ({"aux_layers": (1, 2, 7)}, r"\[1, 2, 7\]"),
    "draft order": ({"draft_ids": torch.tensor([3, 2])}, "not ascending ids from 0 to 511"),
    "draft range": ({"draft_ids": torch.tensor([3, 512])}, "not ascending"),
    "draft type": ({"draft_ids": torch.tensor([1.0])}, "torch.float32"),
    "heads": ({"num_heads": 3, "num_kv_heads": 2}, "3 attention heads over 2"),
    "layers": ({"layers": 0}, "0 layers"),
    "window": ({"kind": "eagle2", "window": 64}, "a head of kind eagle2 has no window"),
    "mask": ({"kind": "peagle", "mask_token_id": 512}, "mask_token_id is 512, wanted 0 to 511"),
    "no mask": ({"kind": "peagle", "draft_ids": torch.arange(5)}, "no unused token for the mask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tiny_target: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises(HeadError, match=message):
        new_head(target_dir=tiny_target, **{"kind": "eagle3", **options})


def test_another_draft_vocabulary(tiny_target: Path) -> None:
    """Tokens that the head knew keep their rows, new ones start with the target's."""
    head = trained_head("eagle3", tiny_target, draft_ids=torch.arange(10, 138))
    assert isinstance(head, Eagle3Head)
    before, lm_head = head.lm_head.weight.detach().clone(), TargetFiles(tiny_target).lm_head()
    ids = torch.tensor([3, 10, 100, 400])
    assert head.change_vocabulary(ids, lm_head) == 2
    assert torch.equal(head.lm_head.weight, torch.stack([lm_head[3], before[0], before[90], lm_head[400]]))
    assert torch.equal(head.to_target(torch.arange(4)), ids) and head.config.draft_vocab_size == 4


def test_a_shallow_target_needs_its_aux_layers_named(tiny_target: Path, tmp_path: Path) -> None:
    folder = altered(tiny_target, tmp_path / "six", num_hidden_layers=6)
    with pytest.raises(HeadError, match=r"\[2, 3, 3\].*name the aux layers"):
        new_head("eagle3", folder)
    assert new_head("eagle3", folder, aux_layers=(1, 3, 5)).aux_layers == (1, 3, 5)


def test_mask_token(tiny_target: Path, tmp_path: Path) -> None:
    folder = altered(tiny_target, tmp_path / "target", vocab_size=512)
    (folder / "tokenizer.json").unlink()
    tokenizer = json.loads((tiny_target / "tokenizer.json").read_text())
    tokens = {"<|reserved_3|>": 509, "<file>": 510, "<turn>": 511}
    tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if i < 507}
    tokenizer["added_tokens"] += [{"id": i, "content": t, "special": True} for t, i in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ '<turn>' }}")
    # First the ids without any token, then the reserved one, then a special one; never what the template writes.
    assert mask_token_candidates(folder) == [508, 507, 509, 510]
    head = new_head("peagle", folder, torch.tensor([3, 508]))
    assert isinstance(head, PEagleHead) and head.mask_token_id == 507


@torch.no_grad()
def test_masked_rows_go_through_the_norms_of_real_ones(tiny_target: Path) -> None:
    head = new_head("peagle", tiny_target, mask_token_id=3)
    assert isinstance(head, PEagleHead)
    head.mask_hidden.normal_(generator=torch.Generator().manual_seed(0))
    state = head.mask_state()
    assert state.shape == (1, 64)
    # fc_norm takes the scale out
    torch.testing.assert_close(state, head.fuse(head.mask_hidden * 100), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(state, head.fc(head.mask_hidden), rtol=0.1)
