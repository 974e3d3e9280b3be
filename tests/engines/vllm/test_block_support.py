"""Which block drafters the plugin serves in vLLM with trees, which it leaves to vLLM, and which no worker serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from dflash_models import tiny_dflash
from dspark_models import tiny_dspark
from head_edits import Edit, config, drop, put, tensors
from tiny_checkpoints import PAD, read_config
from transformers import Qwen3Config
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
from vllm_configs import configure

from eagle_plugin.common.errors import UserError
from eagle_plugin.core.shape import Shape
from eagle_plugin.heads.block_drafter import block_warnings, describe_block
from eagle_plugin.vllm import block_support, plugin_config, unsupported

BLOCK = 8


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    return tiny_dflash(tmp_path / "drafter", target, block=BLOCK)


def options(**values: Any) -> Edit:
    """Change keys of dflash_config."""

    def edit(folder: Path) -> None:
        config(dflash_config=read_config(folder)["dflash_config"] | values)(folder)

    return edit


@pytest.mark.parametrize(
    ("tokens", "given", "caps"),
    [
        (7, {}, Shape(7, 4, 8)),
        (31, {}, Shape(7, 4, 32)),  # a wider tree, and no longer block
        (31, {"depth": 9}, Shape(7, 4, 32)),
        (31, {"depth": 3, "topk": 2}, Shape(3, 2, 32)),
        (63, {"depth": 20, "topk": 1}, Shape(7, 1, 8)),
    ],
)
def test_shapes(tokens: int, given: dict[str, int], caps: Shape, target: Path, drafter: Path, lines: list[str]) -> None:
    speculative = {"num_speculative_tokens": tokens}
    made = configure(target, drafter, "dflash", speculative=speculative, additional_config={"eagle_plugin": given})
    assert made.parallel_config.worker_cls == unsupported.WORKERS["cpu"]
    assert plugin_config.caps_of(made.speculative_config) == caps
    assert lines == []


def test_a_block_that_is_cut_is_told(target: Path, drafter: Path, lines: list[str]) -> None:
    made = configure(target, drafter, "dflash", speculative={"num_speculative_tokens": 4})
    assert plugin_config.caps_of(made.speculative_config) == Shape(4, 4, 5)
    assert len(lines) == 1 and "block_size 8, and num_speculative_tokens 4 makes blocks of 5 tokens" in lines[0]


LEFT: dict[str, tuple[Edit, str]] = {
    "sliding windows": (
        config(layer_types=["sliding_attention"] * 2, sliding_window=64, use_sliding_window=True),
        "layers with sliding windows",
    ),
    "a window for all": (options(use_swa=True, swa_window_size=64), "layers with sliding windows"),
    "the last hidden state": (options(use_aux_hidden_state=False), "use_aux_hidden_state false"),
    "an anchor": (options(sample_from_anchor=True), "sample_from_anchor"),
    "a pickled mask": (lambda folder: (folder / "mask_embedding.pt").write_bytes(b""), "mask_embedding.pt"),
    "a Markov head": (put("markov_head.weight", torch.zeros(4, 4)), "markov_head.weight"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_to_vllm(case: str, target: Path, drafter: Path, lines: list[str]) -> None:
    edit, named = LEFT[case]
    edit(drafter)
    made = configure(target, drafter, "dflash")
    assert not plugin_config.is_served(made.speculative_config)
    assert made.speculative_config.parallel_drafting  # as vLLM has it
    assert len(lines) == 1 and named in lines[0] and "vLLM" in lines[0]


def test_another_kind_is_left_to_vllm(target: Path, drafter: Path, lines: list[str]) -> None:
    """Whose V1 runner, the only one of this machine, does not serve it either."""
    config(architectures=["DFlash2DraftModel"])(drafter)
    with pytest.raises(ValueError, match="Model Runner V1 does not support: DFlash candidate-head drafts"):
        configure(target, drafter, "dflash")
    assert len(lines) == 1 and "DFlash2DraftModel: only DFlashDraftModel and Qwen3DSparkModel are served" in lines[0]


REFUSED: dict[str, tuple[Edit, str]] = {
    "another vocabulary": (config(vocab_size=400), "vocab_size 400"),
    "another width": (config(hidden_size=96), "hidden_size 96"),
    "a mask outside": (options(mask_token_id=512), "mask_token_id 512, wanted 0 to 511"),
    "no mask": (options(mask_token_id=None), "mask_token_id None, wanted a whole number"),
    "layers that are not there": (options(target_layer_ids=[1, 3, 7]), r"target_layer_ids \[1, 3, 7\]"),
    "layers of another number": (options(target_layer_ids=[1, 3]), "fc.weight of shape"),
    "no block": (config(block_size=1), "block_size 1"),
    "a missing tensor": (drop("layers.1.self_attn.k_norm.weight"), "not layers.1.self_attn.k_norm.weight"),
    "another activation": (config(hidden_act="gelu"), "hidden_act 'gelu', wanted silu"),
    "a missing layer": (config(num_hidden_layers=3), "num_hidden_layers 3"),
    "no numbers": (tensors(lambda t: t["norm.weight"].fill_(torch.nan)), "norm.weight"),
    "another shape": (put("norm.weight", torch.ones(32)), "norm.weight of shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_every_worker(case: str, target: Path, drafter: Path) -> None:
    edit, named = REFUSED[case]
    edit(drafter)
    with pytest.raises(UserError, match=named):
        configure(target, drafter, "dflash")


def test_the_method_of_another_kind(target: Path, drafter: Path, head: Path) -> None:
    with pytest.raises(UserError, match="is a block drafter"):
        configure(target, drafter, "eagle3")
    with pytest.raises(UserError, match="no block drafter, but --speculative-config has method dflash"):
        configure(target, head, "dflash")


def test_another_target(tmp_path: Path, drafter: Path) -> None:
    other = tiny_models.tiny_llama(tmp_path / "other", head_dim=32, vocab=448)
    with pytest.raises(UserError, match="vocab_size 512, but the target's is 448"):
        configure(other, drafter, "dflash")


@pytest.mark.parametrize(
    ("part", "attribute", "named"),
    [
        ("model_config", "is_multimodal_model", "its images are not served with block drafters yet"),
        ("model_config", "use_mla", "it is not served with block drafters yet"),
    ],
)
def test_targets_that_are_left(
    part: str, attribute: str, named: str, target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = configure(target, drafter, "dflash")
    monkeypatch.setattr(type(getattr(made, part)), attribute, True)
    assert any(named in reason for reason in unsupported.unsupported_reasons(made))


@pytest.fixture
def markov(target: Path, tmp_path: Path) -> Path:
    return tiny_dspark(tmp_path / "markov", target, block=BLOCK)


@pytest.mark.parametrize(
    ("tokens", "anchor", "caps"),
    [(7, True, Shape(7, 4, 8)), (31, True, Shape(8, 4, 32)), (31, False, Shape(7, 4, 32))],
)
def test_a_markov_head(tokens: int, anchor: bool, caps: Shape, target: Path, markov: Path, lines: list[str]) -> None:
    """It is planned as DFlash is, with the layers where vLLM's V1 model runner reads them."""
    config(sample_from_anchor=anchor)(markov)
    made = configure(target, markov, "dspark", speculative={"num_speculative_tokens": tokens})
    assert made.parallel_config.worker_cls == unsupported.WORKERS["cpu"]
    speculative = made.speculative_config
    assert plugin_config.caps_of(speculative) == caps
    assert (speculative.method, block_support.method_of(speculative)) == ("dflash", "dspark")
    assert speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids == [2, 4, 6]
    cut = "block_size 8, and num_speculative_tokens 7 makes blocks of 7 tokens"
    assert len(lines) == (caps.steps < 8 and anchor) and all(cut in line for line in lines)


MARKOV_LEFT: dict[str, tuple[Edit, dict[str, Any], str]] = {
    "a gated Markov head": (config(markov_head_type="gated"), {}, "markov_head_type gated: only vanilla"),
    "another part": (put("markov_head.gate_proj.weight", torch.zeros(4, 4)), {}, "markov_head.gate_proj.weight"),
    "a list before the bias": (config(), {"dspark_draft_topk": 4}, "dspark_draft_topk: it belongs to vLLM's chains"),
    "adaptive verification": (config(), {"enable_adaptive_verification": True}, "adaptive draft verification"),
}


@pytest.mark.parametrize("case", MARKOV_LEFT)
def test_a_markov_head_that_is_left_to_vllm(case: str, target: Path, markov: Path, lines: list[str]) -> None:
    """Whose V1 runner, the only one of this machine, serves none."""
    edit, speculative, named = MARKOV_LEFT[case]
    edit(markov)
    with pytest.raises(ValueError, match="Model Runner V1 does not support: dspark speculative decoding"):
        configure(target, markov, "dspark", speculative=speculative)
    assert len(lines) == 1 and named in lines[0] and "vLLM" in lines[0]


MARKOV_REFUSED: dict[str, tuple[Edit, str]] = {
    "no rank": (config(markov_rank=...), "has markov_rank None, wanted a positive whole number"),
    "a rank of no numbers": (config(markov_rank=0), "has markov_rank 0, wanted a positive whole number"),
    "another rank": (config(markov_rank=8), "markov_head.markov_w1.weight of shape"),
    "another shape": (put("markov_head.markov_w2.weight", torch.zeros(400, 16)), "markov_w2.weight of shape"),
    "no table": (drop("markov_head.markov_w1.weight"), "not markov_head.markov_w1.weight"),
    "no mask": (config(mask_token_id=...), "mask_token_id None, wanted a whole number in config.json"),
    "other layers": (config(target_layer_ids=[1, 3, 7]), r"target_layer_ids \[1, 3, 7\], .* in config.json"),
}


@pytest.mark.parametrize("case", MARKOV_REFUSED)
def test_a_markov_head_that_no_worker_serves(case: str, target: Path, markov: Path) -> None:
    edit, named = MARKOV_REFUSED[case]
    edit(markov)
    with pytest.raises(UserError, match=named):
        configure(target, markov, "dspark")


def test_the_method_of_the_other_kind(target: Path, markov: Path) -> None:
    with pytest.raises(UserError, match='is a dspark drafter, but .* method dflash; serve it with "method": "dspark"'):
        configure(target, markov, "dflash")


@pytest.mark.parametrize("value", [False, True, None])
@pytest.mark.parametrize("inner", [{}, {"is_causal": True}])
def test_the_mask_of_a_drafter_of_speculators(
    value: bool | None, inner: dict[str, Any], drafter: Path, target: Path
) -> None:
    """It is causal where vLLM's class is, in every layer; and a warning says so where the key may mean less."""
    written = read_config(drafter)
    ids = [i + 1 for i in written.pop("dflash_config")["target_layer_ids"]]
    about = {"speculators_model_type": "dflash", "mask_token_id": PAD, "aux_hidden_state_layer_ids": ids}
    about |= {"block_size": BLOCK} | ({} if value is None else {"sliding_window_non_causal": value})
    layers = {key: value for key, value in written.items() if key not in ("architectures", "block_size")}
    (drafter / "config.json").write_text(json.dumps(about | {"transformer_layer_config": layers | inner}))
    served = Qwen3Config(**SpeculatorsConfig.extract_transformers_pre_trained_config(read_config(drafter)))
    wanted = {_dflash_layer_causal(served, i) for i in range(served.num_hidden_layers)}
    assert {describe_block(target, drafter).causal} == wanted
    told = [line for line in block_warnings(drafter, BLOCK - 1) if "sliding_window_non_causal" in line]
    assert bool(told) == (value is False and not inner)
