"""Steps `yardstick` and `vllm-yardstick` of `make gpu`: rates, cases, windows, and the small form in engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu import yardstick
from benchmarks.gpu.model_cases import CHAIN, FIXED, TREE
from benchmarks.gpu.model_engine import STARTED, Event, Window, measure
from benchmarks.gpu.model_process import SERVES, EngineProcess
from benchmarks.gpu.run_step import end_at_once
from benchmarks.gpu.steps import Setting, StepEnded, StepError
from benchmarks.gpu.yardstick_cases import (
    CASES,
    FULL,
    LONG_CHAIN,
    NEEDED,
    SHORT,
    SHORT_CASES,
    SMALLEST,
    Start,
    arguments,
    cases_of,
    environment,
    size_of,
    wanted_length,
)
from benchmarks.gpu.yardstick_models import MODELS, TINY_MODELS, write_models
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.heads.checkpoint import check_head
from eagle_plugin.policy.shapes import captured_shapes, shape_for
from eagle_plugin.runtime.synthetic import VARIABLE, parse_rates

ROOT = Path(__file__).resolve().parents[2]
RATES = {TREE: (0.7, 0.4, 0.2), CHAIN: (0.5, 0.3, 0.1), LONG_CHAIN: (0.5, 0.3, 0.1, 0.1, 0.0)}


def test_recorded_rates_are_those_of_each_shapes_own_rounds() -> None:
    """A tree's higher acceptance is that of its nodes, and wider trees do not accept less."""
    rates = yardstick.recorded_rates()
    same = shape_for(3, on_gpu=True)  # what the plugin makes of the flags of the engine's chains in vLLM
    wanted = {*captured_shapes(TREE), *captured_shapes(CHAIN), *captured_shapes(same), same, CHAIN}
    assert set(rates) >= wanted - {PLAIN}
    assert all(len(of) == shape.max_accept_length - 1 for shape, of in rates.items())
    assert all(1 > of[0] >= of[-1] > 0 and list(of) == sorted(of, reverse=True) for of in rates.values())
    lengths = [sum(rates[shape]) for shape in (Shape(3, 1, 4), Shape(3, 4, 8), Shape(3, 4, 16))]
    assert lengths == sorted(lengths) and lengths[2] > 1.3 * lengths[0]
    assert dict(parse_rates(yardstick.format_rates(rates))).keys() == rates.keys()


def test_every_way_to_accept_gets_its_rates(tmp_path: Path) -> None:
    for engine, cases in CASES.items():
        for name, case in cases.items():
            found = environment(engine, case, True, RATES)
            start = Start(tmp_path, tmp_path, True, 0.4, FULL, RATES)
            given = arguments(engine, case, start)
            assert given["load_format"] == "dummy" and given["skip_tokenizer_init"]
            own = str(given.get("speculative_config", {}).get("synthetic_acceptance_rates", ""))
            ways = [VARIABLE in found, "SGLANG_SIMULATE_ACC_LEN" in found, bool(own)]
            assert sum(ways) == (0 if name == "plain" else 1), (engine, name)
            assert ways[0] == case.plugin
    assert environment("sglang", CASES["sglang"]["engine-tree"], True, RATES)["SGLANG_SIMULATE_ACC_LEN"] == "2.3000"
    policies = [CASES[engine]["plugin-policy"] for engine in CASES]
    assert all(FIXED[0] not in case.environment and wanted_length(case, RATES) is None for case in policies)
    assert wanted_length(CASES["vllm"]["engine-chain"], RATES) == pytest.approx(1.9)


SPECULATES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def test_one_case_of_the_plugin_has_the_flags_of_the_engines_chains(tmp_path: Path) -> None:
    """So that a row answers what the same command line gives with the plugin installed. The policy chooses shapes."""
    start = Start(tmp_path, tmp_path, True, 0.4, FULL, RATES)
    for engine, cases in CASES.items():
        ours, own = (arguments(engine, cases[name], start) for name in ("plugin-same", "engine-chain"))
        found = dict(own.get("speculative_config", {}))
        for name in ("rejection_sample_method", "synthetic_acceptance_rates"):  # by a variable of ours
            found.pop(name, None)
        assert ours.get("speculative_config", {}) == found and "additional_config" not in ours
        assert [ours.get(name) for name in SPECULATES] == [own.get(name) for name in SPECULATES]
        assert not cases["plugin-same"].environment
        other = arguments(engine, cases["plugin-policy"], start)  # negative control
        assert other.get("speculative_config") != found or other.get(SPECULATES[2]) != own.get(SPECULATES[2])
    given = environment("vllm", CASES["vllm"]["plugin-v2"], True, RATES)
    assert given["EAGLE_VLLM_RUNNER"] == "v2" and "EAGLE_POLICY" not in given


def test_the_short_form_starts_all_its_engines_at_once() -> None:
    """With 138 GiB of free memory."""
    for engine, cases in SHORT_CASES.items():
        setting = Setting("cuda", tiny=False, short=True, engine=engine)
        assert cases_of(engine, setting) == list(cases) and set(NEEDED) <= set(cases) < set(CASES[engine])
        assert len(cases) <= 138 // MODELS[0].memory_with(SHORT.cache) and size_of(setting) == SHORT
        assert cases_of(engine, Setting("cuda", tiny=False)) == list(CASES[engine])
    assert SHORT.requests == (1, 8, 32) and SHORT.cache < FULL.cache
    large = MODELS[0]  # 128 KiB of keys and values per token, and the head's
    assert large.memory_with(1 << 13) - large.memory == pytest.approx(1 + 1 / 32)


@pytest.mark.parametrize("model", TINY_MODELS)
def test_a_head_fits_its_target(model: Any, tmp_path: Path) -> None:
    target, head = write_models(model, tmp_path, "float32", "cpu")
    assert check_head(target, head, algorithm="EAGLE3").warnings is not None
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_heads_have_published_sizes() -> None:
    """That of Llama-3.1-8B has some 425 million weights beside the target's embedding."""
    (large, mixture), decoder = MODELS, MODELS[0].decoder
    weights = decoder.head_weights(large.draft_vocabulary) + 3 * decoder.hidden**2
    assert weights == pytest.approx(425e6, rel=0.02)
    config = mixture.target_config("bfloat16")
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert config["num_hidden_layers"] * config["num_experts"] * expert == pytest.approx(29e9, rel=0.02)


def test_a_heads_logits_are_as_far_apart_as_a_trained_heads(tmp_path: Path) -> None:
    """Else all trees would be flat, and no path of them as long as the rates say."""
    _, head = write_models(TINY_MODELS[0], tmp_path, "float32", "cpu")
    with safe_open(head / "model.safetensors", "pt") as file:
        output = file.get_tensor("lm_head.weight")
    state = torch.randn(200, output.shape[1], generator=torch.Generator().manual_seed(0))
    logits = torch.nn.functional.rms_norm(state, output.shape[1:]) @ output.T
    assert 0.3 < float(logits.softmax(-1).amax(-1).mean()) < 0.9


def rounds(yields: list[list[int]], tokens: int) -> list[Event]:
    """Events of requests that get yields[i] tokens in turn, each round in one second, after a first token."""
    events, counts = [], [1] * len(yields)
    for number in range(10 * tokens):
        for i, of in enumerate(yields):
            if counts[i] < tokens:
                counts[i] = min(counts[i] + of[number % len(of)], tokens)
                events.append(Event(number + i / 100, i, counts[i], counts[i] == tokens))
    return events


@pytest.mark.parametrize("yields", [[[1]], [[3], [1]], [[1, 3], [2], [4, 1]]])
def test_a_window_has_whole_rounds_of_all_requests(yields: list[list[int]]) -> None:
    window = Window.of(rounds(yields, 100), len(yields))
    per_round = sum(sum(of) / len(of) for of in yields)
    assert window.tokens == pytest.approx(per_round * round(window.seconds), abs=4)
    assert window.seconds > 10 and STARTED < 100


def test_what_an_engine_is_measured_by() -> None:
    class Fake:
        rounds = 5

        def stream(self, prompts: list[list[int]], tokens: int) -> Any:
            yield from rounds([[2, 3], [3, 2]], tokens)
            self.rounds += 2 * 40

    found = measure(Fake(), [[1], [2]], 101)
    assert found["accept_length"] == pytest.approx(200 / 80)
    assert found["tokens_per_s"] == pytest.approx(5, rel=0.03)  # of both, one round per second
    assert found["round_ms"] == pytest.approx(1000, rel=0.03)


class Answers(EngineProcess):
    """An engine that has its answers already."""

    def __init__(self, name: str, log: str, answer: dict[str, float]) -> None:
        self.case, self._text, self._answer, self.mode = CASES["sglang"][name], log, answer, ""

    def wait_for_start(self, limit: float) -> float:
        return 1.0

    def log(self) -> str:
        return self._text

    def ask(
        self, prompts: list[list[int]], temperature: float, tokens: int, forget: bool = False, timed: bool = False
    ) -> dict[str, Any]:
        assert timed and all(len(prompt) == SMALLEST.prompt for prompt in prompts)
        return self._answer


def test_rows_state_the_cost_alone_and_the_speed() -> None:
    plain = Answers("plain", "", {"tokens_per_s": 100.0, "accept_length": 1.0, "round_ms": 10.0})
    tree = Answers("plugin-tree", "", {"tokens_per_s": 200.0, "accept_length": 2.3, "round_ms": 11.5})
    rows: list[dict[str, Any]] = []
    for name, engine in (("plain", plain), ("plugin-tree", tree)):
        row = {"case": name} | yardstick.measure(engine, TINY_MODELS[0], 1, SMALLEST, RATES)
        rows.append(yardstick.compare(row, rows))
    assert (rows[0]["plain_steps"], rows[0]["times_plain"], rows[0]["given_length"]) == (1.0, 1.0, 1.0)
    assert (rows[1]["plain_steps"], rows[1]["times_plain"], rows[1]["given_length"]) == (1.15, 2.0, 2.3)
    assert yardstick.as_sentence(rows[1]) == (
        "tiny Llama, the plugin, trees 3/4/16 in every round, 1 request: a round takes 11.50 ms (1.15 plain steps), "
        "accept length 2.30, 200 tokens/s, 2.00x plain"
    )
    assert yardstick.compare(rows[1] | {"requests": 8}, rows)["plain_steps"] is None


def test_a_server_that_the_engine_serves_is_no_row_of_the_plugin() -> None:
    served = f"EAGLE3 {SERVES} (...)"
    Answers("plugin-tree", served, {}).wait_until_it_serves(1.0)
    handed = f"{served}\neagle-plugin 0.1.0: EAGLE3 is served by SGLang's own worker: why"
    for log in ("", handed):
        with pytest.raises(StepError, match="the plugin does not serve"):
            Answers("plugin-tree", log, {}).wait_until_it_serves(1.0)
    Answers("engine-tree", "", {}).wait_until_it_serves(1.0)


def test_an_engine_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kept = tmp_path / "python", []
    program.write_text("#!/bin/sh\necho 'ValueError: no such flag' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(yardstick, "need_modules", lambda *names: None)
    monkeypatch.setattr(yardstick, "recorded_rates", lambda: RATES)
    setting = Setting("cpu", True, "sglang", keep=lambda found: kept.append(json.loads(json.dumps(found))))
    with pytest.raises(StepError, match=r"^no row of plain of tiny Llama, .*: .* does not answer: ValueError: no such"):
        yardstick.run(setting)
    assert len(kept[-1]["failed"]) == len(TINY_MODELS) * len(CASES["sglang"])
    counts = [len(one["failed"]) for one in kept]
    assert counts[:3] == [2, 4, 6] and counts == sorted(set(counts)), "kept after each group"


def test_a_step_that_is_ended_asks_no_further_engine() -> None:
    found: dict[str, Any] = {"failed": {}}
    with pytest.raises(StepEnded), yardstick.failing(TINY_MODELS[0], "plain", found, Setting("cpu", True)):
        end_at_once(15, None)
    assert not found["failed"]
    with yardstick.failing(TINY_MODELS[0], "plain", found, Setting("cpu", True)):
        raise StepError("it does not answer")
    assert list(found["failed"].values()) == ["it does not answer"]


def check_rows(found: dict[str, Any], engine: str) -> None:
    """Every case of both models has a row, with the accept length that was given."""
    wanted = {(model.name, name) for model in TINY_MODELS for name in cases_of(engine, Setting("cpu", True))}
    assert {(row["model"], row["case"]) for row in found["rows"]} == wanted and not found["failed"]
    for row in found["rows"]:
        assert row["round_ms"] > 0 and row["tokens_per_s"] > 0 and row["plain_steps"] > 0
        # vLLM's own rounds are not synthetic on a CPU. The others are of some 40 rounds of each request.
        if row["given_length"] is not None and not (engine == "vllm" and row["case"].startswith("engine-chain")):
            assert row["accept_length"] == pytest.approx(row["given_length"], rel=0.2), row


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_small_form_in_a_real_engine(engine: str, tmp_path: Path) -> None:
    """Both engines' processes have the interpreters of their own environments."""
    python = sys.executable if engine == "sglang" else ROOT / ".venv-vllm/bin/python"
    step = "yardstick" if engine == "sglang" else "vllm-yardstick"
    command = [str(python), "-m", "benchmarks.gpu.run_step", step, "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--identity", "{}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_rows(json.loads((tmp_path / f"{step}.json").read_text())["result"], engine)
