"""SGLang serves each head that it serves without the plugin, with the text of plain decoding; others get a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import family_models
import head_rows
import pytest
from head_edits import config
from head_rows import AUX, LAYERS, ROWS
from serving import accept_length, generate_all, responses, serving, tiny_spec

PROMPTS = ["tree root leaf", "the quick brown fox", "hello"]
SERVED = [name for name, row in ROWS.items() if row.sglang == "plugin"]
TOKENS = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return head_rows.write_target(tmp_path_factory.mktemp("rows"))


def responses_of(servers: list, tokens: int = TOKENS) -> list[list[str]]:
    return [responses(generate_all(server, PROMPTS, tokens, 1)) for server in servers]


@pytest.mark.server
@pytest.mark.matrix  # two servers per head: `test_refusals.py` has the same decisions without a server
@pytest.mark.parametrize("name", SERVED)
def test_the_plugin_serves(name: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    head = head_rows.write_row(name, models[1])
    with serving([tiny_spec(models[0]), tiny_spec(models[0], head)], tmp_path) as servers:
        plain, served = (generate_all(server, PROMPTS, TOKENS, 1) for server in servers)
        assert responses(served) == responses(plain)
        found = accept_length(served)
        assert (found > 2.3) == ROWS[name].right_in_sglang, found  # trees of two levels: at most 3


@pytest.mark.server
@pytest.mark.matrix  # `test_the_plugin_serves` has a window of config.json, which is set at the same place
def test_the_windows_flag_comes_before_the_heads_window(models: tuple[Path, Path], tmp_path: Path) -> None:
    """SGLang counts the keys before a row's own: with two keys in place of one the drafts of this head are poor."""
    head = head_rows.write_row("a window of one token", models[1])
    spec = tiny_spec(models[0], head, extra_flags=("--speculative-draft-window-size", "1"))
    with serving([tiny_spec(models[0]), spec], tmp_path) as servers:
        plain, served = (generate_all(server, PROMPTS, TOKENS, 1) for server in servers)
        assert responses(served) == responses(plain)
        assert accept_length(served) < 2.3


@pytest.mark.server
@pytest.mark.matrix  # what SGLang alone does with the same heads: no line of the plugin runs
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.stock_sglang])
def test_sglang_alone(name: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    spec = tiny_spec(models[0], head_rows.write_row(name, models[1]), mode="builtin")
    with serving([tiny_spec(models[0]), spec], tmp_path) as servers:
        plain, alone = responses_of(servers)
        assert alone == plain


@pytest.fixture(scope="module", params=[("gpt_oss", [4, 6, LAYERS]), ("gemma3_text", [3, 5, LAYERS - 1])])
def last_layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose class captures the output of its last layer, and a head that names it."""
    family, ids = request.param
    folder = tmp_path_factory.mktemp(family)
    target = family_models.sglang_target(folder / "target", family)
    head = family_models.family_head(folder / "head", target)
    (head / "eagle_plugin.json").unlink()
    config(eagle_config={"use_aux_hidden_state": True, AUX: ids}, **{AUX: ...})(head)
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == LAYERS
    return target, head


@pytest.mark.server
@pytest.mark.matrix  # three servers: `tests/heads/test_accepted_heads.py` has the same ids without one
def test_the_output_of_the_last_layer(last_layer: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = last_layer
    specs = [tiny_spec(target), tiny_spec(target, head), tiny_spec(target, head, mode="builtin")]
    with serving(specs, tmp_path) as servers:
        plain, served, alone = responses_of(servers)
        assert served == plain and alone == plain
        answers = generate_all(servers[1], PROMPTS, TOKENS, 1)
        assert accept_length(answers) > 1.02  # an untrained head, but for tokens that the target says


@pytest.mark.server
@pytest.mark.matrix  # `test_refusals.py` has the same sentence without a server
def test_a_token_twice_is_left_to_sglang(models: tuple[Path, Path], tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(models[1], head)
    head_rows.one_token_twice(head)
    spec = tiny_spec(models[0], head, name="left")
    plain = tiny_spec(models[0])
    with serving([plain], tmp_path / "logs") as servers:
        (wanted,) = responses_of(servers)
    with (
        pytest.raises(Exception, match=r"SGLang's own worker: .*maps 290 draft ids to 289"),
        serving([spec], tmp_path / "left"),
    ):
        pass  # `check_worker` wants the plugin's
    with serving([tiny_spec(models[0], head, mode="builtin")], tmp_path / "alone") as servers:
        assert responses_of(servers) == [wanted]
