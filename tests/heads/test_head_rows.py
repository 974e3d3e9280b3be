"""What the rules of each engine make of the rows of `head_rows`, without an engine: served, or a sentence."""

from __future__ import annotations

from pathlib import Path

import head_rows
import pytest
from head_rows import ROWS

from eagle_plugin.cli import main
from eagle_plugin.heads.files import HeadError
from eagle_plugin.heads.vllm_rules import check_head, count_aux
from eagle_plugin.runtime.preflight import head_warnings


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
    "a window of one token": "layer_types ['sliding_attention'], wanted full_attention in every layer",
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


def test_the_command_names_what_vllm_does_not_start_with(
    models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    head = head_rows.write_row("names after model.", models[1])
    assert main(["check", str(models[0]), str(head), "--files-only"]) == 0
    assert "vLLM               does not start: " in capsys.readouterr().out
    assert main(["check", str(models[0]), str(head), "--files-only", "--engine", "vllm"]) == 2
    assert "for which vLLM's class" in capsys.readouterr().err
