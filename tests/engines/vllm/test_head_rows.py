"""vLLM serves every head that it serves without the plugin, with the text of plain decoding, and some more."""

from __future__ import annotations

from pathlib import Path

import head_rows
import pytest
import torch
from head_edits import config, tensors
from head_rows import ROWS
from tiny_checkpoints import read_config
from trained_heads import trained_head
from vllm_engines import accept_length, engine, generate, runner

from eagle_plugin.heads.export import save_head

PROMPTS = ["tree root leaf", "the quick brown fox", "hello"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return head_rows.write_target(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> list[list[int]]:
    with engine(models[0]) as llm:
        return generate(llm, PROMPTS)


@pytest.mark.matrix  # a start of an engine each: `test_head_rules.py` has the same decisions without one
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.vllm == "plugin"])
def test_the_plugin_serves(name: str, models: tuple[Path, Path], plain: list[list[int]]) -> None:
    with engine(models[0], head_rows.write_row(name, models[1])) as llm:
        assert generate(llm, PROMPTS) == plain
        found = accept_length(llm)
        assert (found > 2.5) == ROWS[name].right, found  # trees of two levels: at most 3


@pytest.mark.matrix  # a start of an engine; the text and the drafts of this head are in the test above
def test_a_window_of_the_head_alone_makes_no_groups_of_caches(models: tuple[Path, Path]) -> None:
    with engine(models[0], head_rows.write_row("a window of one token", models[1])) as llm:
        assert len(runner(llm).kv_cache_config.kv_cache_groups) == 1


@pytest.mark.matrix  # the class for norms of q and k has masked rows too
def test_a_p_eagle_head_with_norms_of_q_and_k(
    models: tuple[Path, Path], plain: list[list[int]], tmp_path: Path
) -> None:
    head = trained_head("peagle", models[0], mask_token_id=2, layers=2)
    save_head(head, tmp_path / "head", target_dir=models[0], dtype=torch.float32)
    size = head.config.head_dim
    names = [f"layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk"]
    tensors(lambda t: t.update({name: torch.ones(size) for name in names}))(tmp_path / "head")
    (tmp_path / "head" / "eagle_plugin.json").unlink()
    config(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")(tmp_path / "head")
    with engine(models[0], tmp_path / "head", depth=3) as llm:
        assert runner(llm).drafter.levels.mask is not None
        assert generate(llm, PROMPTS) == plain


def test_an_eagle_head_with_mistrals_layers(models: tuple[Path, Path], plain: list[list[int]], tmp_path: Path) -> None:
    """Its class has a norm before the first layer, and one after the last, whose states the head reads too."""
    save_head(trained_head("eagle2", models[0]), tmp_path / "head", target_dir=models[0], dtype=torch.float32)
    (tmp_path / "head" / "eagle_plugin.json").unlink()
    hidden = read_config(models[0])["hidden_size"]

    def renamed(found: dict[str, torch.Tensor]) -> None:
        stored = {name.removeprefix("model."): found.pop(name) for name in list(found)}
        stored |= {name: torch.ones(hidden) for name in ("norm.weight", "layers.0.input_layernorm.weight")}
        found.update({f"model.{name}": tensor for name, tensor in stored.items()})

    tensors(renamed)(tmp_path / "head")
    config(architectures=["EagleMistralForCausalLM"], model_type="mistral")(tmp_path / "head")
    with engine(models[0], tmp_path / "head", chain=True, nodes=4) as llm:
        generate(llm, PROMPTS)
        vllms = accept_length(llm)
    for topk, nodes in ((1, 4), (4, 8)):
        with engine(models[0], tmp_path / "head", depth=3, topk=topk, nodes=nodes) as llm:
            assert type(runner(llm).drafter.model).__name__ == "EagleMistralForCausalLM"
            assert generate(llm, PROMPTS) == plain
            assert accept_length(llm) == vllms > 1 if topk == 1 else accept_length(llm) > vllms


@pytest.mark.matrix  # what vLLM alone does with the same heads: no line of the plugin runs
@pytest.mark.parametrize("name", ROWS)
def test_vllm_alone(name: str, models: tuple[Path, Path], plain: list[list[int]]) -> None:
    head = head_rows.write_row(name, models[1])
    if not ROWS[name].stock_vllm:
        with pytest.raises(Exception, match=r".") as failed, engine(models[0], head, chain=True):
            pass
        assert "eagle-plugin" not in str(failed.value)
        return
    with engine(models[0], head, chain=True) as llm:
        assert generate(llm, PROMPTS) == plain
        assert (accept_length(llm) > 5) == ROWS[name].right
