"""The options of the commands, and their messages when something is missing."""

import argparse

import pytest

from eagle_plugin.bench import demo, serve
from eagle_plugin.bench.choices import parse_shape
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.core.shape import Shape


def test_shapes_are_read_and_refused():
    assert parse_shape("3/1/4") == parse_shape("3") == Shape(3, 1, 4)
    for text in ("3/1", "a/b/c", "1/2/3/4", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="2/4/8"):
            parse_shape(text)


def test_flags_after_the_dashes_go_to_the_engine():
    options = serve.parse(["--port", "7", "--", "--chunked-prefill-size", "64"])
    assert options.port == 7 and options.engine_flags == ["--chunked-prefill-size", "64"]


def test_curl_example_is_one_command():
    assert serve.curl_example("http://127.0.0.1:1").startswith("curl -N http://127.0.0.1:1/v1/chat/completions ")


@pytest.mark.parametrize("main", [demo.main, serve.main])
def test_a_folder_without_a_checkpoint_is_refused(main, tmp_path, capsys):
    assert main(["--target", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "no config.json there" in capsys.readouterr().out


def test_an_unknown_model_is_refused(tmp_path, capsys):
    assert demo.main(["--target", "no-such-model", "--out", str(tmp_path)]) == 1
    assert "no-such-model" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--max-tokens", "--threads", "--passes"])
def test_counts_below_one_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        demo.parse([flag, "0"])
    assert f"{flag} is 0, wanted at least 1" in capsys.readouterr().err


def test_each_engine_has_its_own_shapes():
    sglang, vllm = demo.parse([]), demo.parse(["--engine", "vllm"])
    assert (sglang.steps, sglang.topk, sglang.draft_tokens) == (2, 4, 8) == sglang.builtin
    assert vllm.builtin.topk == 1 and vllm.builtin.width == vllm.builtin.steps + 1
    assert ENGINES["sglang"].default_threads(2) == 2 and ENGINES["vllm"].default_threads(2) == 1
    assert ENGINES["vllm"].default_threads(1) == 1 and ENGINES["vllm"].default_threads(8) == 7
    given = demo.parse(["--engine", "vllm", "--topk", "3", "--builtin", "4"])
    assert (given.steps, given.topk, given.draft_tokens) == (vllm.steps, 3, vllm.draft_tokens)
    assert given.builtin == (4, 1, 5)
