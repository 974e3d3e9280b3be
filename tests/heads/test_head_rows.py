"""What the rules of each engine make of the rows of `head_rows`, without an engine: served, or a sentence."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import head_rows
import pytest
from head_rows import ROWS
from wild_heads import ACCEPTED, write
from wild_layouts import LAYOUTS

from eagle_plugin.cli import main
from eagle_plugin.heads.files import HeadError, read_config
from eagle_plugin.heads.kinds import stored_algorithm
from eagle_plugin.heads.vllm_rules import check_head, count_aux
from eagle_plugin.runtime.preflight import head_warnings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "heads-format.md").read_text("utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return head_rows.write_target(tmp_path_factory.mktemp("rows"))


def verdict(check: object, *arguments: object) -> str:
    """ "plugin", or the sentence that ends the start."""
    try:
        check(*arguments)  # type: ignore[operator]
    except HeadError as error:
        return str(error)
    return "plugin"


@pytest.mark.parametrize("name", ROWS)
def test_the_rules_of_both_engines(name: str, models: tuple[Path, Path]) -> None:
    target, head = models[0], head_rows.write_row(name, models[1])
    assert ROWS[name].vllm in verdict(check_head, target, head, "eagle3")
    if "quantization_config" not in name:  # with it SGLang starts on a GPU, and `sglang.preflight` knows the device
        assert ROWS[name].sglang in verdict(head_warnings, target, head, "EAGLE3")


MISREAD = {  # what SGLang serves otherwise than the head was trained: a part of the warning
    "one aux layer": "SGLang's class leaves fc out where states have that width",
    "norm_before_residual": "norm_before_residual true, which SGLang's EAGLE-3 layer does not read",
    "a window in one of two layers": "layer_types ['sliding_attention', 'full_attention'], wanted full_attention",
    "biases of q, k, v": "k_proj.bias, which the engine's EAGLE-3 layer drops without a message",
    "an embedding unlike the target's": "vLLM drafts with it and SGLang with the target's",
    "tied beside an own lm_head": "tie_word_embeddings true, with which the engine drafts with the target's embedding",
    "vLLM's key of aux layers": "at the top level, where the engine does not read it",
}


@pytest.mark.parametrize("name", MISREAD)
def test_sglang_is_warned_of(name: str, models: tuple[Path, Path]) -> None:
    """What a server goes on with is what the command `check` refuses, where no value shows that it is harmless."""
    target, head = models[0], head_rows.write_row(name, models[1])
    assert MISREAD[name] in " ".join(head_warnings(target, head, "EAGLE3"))
    assert not any(MISREAD[name] in line for line in head_warnings(target, models[1], "EAGLE3"))


def test_vllm_is_told_the_number_of_aux_layers(models: tuple[Path, Path]) -> None:
    rows = ("as it should be", "four aux layers", "four aux layers under vLLM's key alone", "one aux layer")
    found = [count_aux(models[0], head_rows.write_row(name, models[1])) for name in rows]
    assert found == [None, None, 4, None]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.vllm == "plugin"])
def test_the_command_for_vllm(name: str, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", str(models[0]), str(head_rows.write_row(name, models[1])), "--files-only"]
    assert main([*command, "--engine", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert 'vLLM               "method": "eagle3"' in printed and "SGLang  " not in printed
    both = main(command)
    out, error = capsys.readouterr()
    if both == 0:
        assert "SGLang             --speculative-algorithm EAGLE3" in out and 'vLLM               "method"' in out
    else:
        assert "; vLLM serves it as it is (eagle-plugin check --engine vllm)" in error and "Traceback" not in error


def table(file: str) -> dict[str, list[str]]:
    """The cells of docs/heads-format.md about the heads of a test's file, by head."""
    lines = iter(DOCUMENT.splitlines())
    next(line for line in lines if line.startswith(f"| head (`tests/heads/{file}`)"))
    rows = [line.strip("| ").split(" | ") for line in takewhile(lambda line: line.startswith("|"), lines)]
    return {name: cells for name, *cells in rows[1:]}


def says(cell: str) -> bool:
    """Whether a cell of the document says that an engine, or `check`, takes the head."""
    return not cell.startswith(("refused", "does not start", "left"))


def test_the_document_has_every_row(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = table("test_head_rows.py")
    assert found.keys() == ROWS.keys()
    for name, (check, sglang, vllm) in found.items():
        head = head_rows.write_row(name, models[1])
        assert says(check) == (main(["check", str(models[0]), str(head), "--files-only"]) == 0), name
        assert says(vllm) == (ROWS[name].vllm == "plugin"), name
        assert says(sglang) == (ROWS[name].sglang == "plugin") or "on a CPU" in sglang, name
    assert "Traceback" not in capsys.readouterr().err


def test_the_document_has_layouts(tiny_target: Path, tmp_path: Path) -> None:
    found = table("test_wild_heads.py")
    assert len(found) > 10
    for name, (check, sglang, vllm) in found.items():
        layout, folder = LAYOUTS[name], write(LAYOUTS[name], tmp_path / name.replace(" ", "-"), tiny_target)
        algorithm = stored_algorithm(read_config(folder))
        assert says(check) == (layout.check == ACCEPTED), name
        assert says(vllm) == (layout.vllm == ACCEPTED), name
        assert vllm.startswith("left") == ("the plugin serves" in layout.vllm), name
        if not sglang.startswith("left"):
            assert says(sglang) == (verdict(head_warnings, tiny_target, folder, algorithm) == "plugin"), name


def test_the_command_names_what_vllm_does_not_start_with(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    head = head_rows.write_row("names after model.", models[1])
    assert main(["check", str(models[0]), str(head), "--files-only"]) == 0
    assert "vLLM               does not start: " in capsys.readouterr().out
    assert main(["check", str(models[0]), str(head), "--files-only", "--engine", "vllm"]) == 2
    assert "for which vLLM's class" in capsys.readouterr().err
