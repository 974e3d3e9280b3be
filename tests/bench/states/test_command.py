"""The whole benchmark against servers that answer with a known speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_plugin.bench import measurement, preparation, sglang_server, steal, vllm_server
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.bench.states import command
from eagle_plugin.bench.states.configs import state_specs
from eagle_plugin.bench.states.facts import head_facts, shown_arguments
from eagle_plugin.learning.report.page import write_report

PEER = Path(__file__).parents[2] / "support/peer.py"
GAPS = {"none": 0.004, "base": 0.004, "trained": 0.001}  # seconds per token
SECRET = "a secret question"


@pytest.fixture
def arguments(any_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a run whose servers are peers, on a machine without steal."""

    def launch(spec: ServerSpec, port: int) -> list[str]:
        return [sys.executable, str(PEER), str(port), "--gap", str(GAPS[spec.name])]

    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], command=launch))
    monkeypatch.setattr(steal.StealWatch.__init__, "__defaults__", (lambda text: None, 0.05, lambda: steal.Ticks(1, 0)))
    monkeypatch.setattr(preparation, "busy_percent", lambda: 0.0)
    for name in ("target", "new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_text(name)
    row = {"id": "a", "source": "a", "messages": [{"role": "user", "content": SECRET}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    return [str(tmp_path / "target"), "--head", str(tmp_path / "new"), "--base-head", str(tmp_path / "old"),
            "--prompts", str(tmp_path / "prompts.jsonl"), "--sets", "--out", str(tmp_path / "out"),
            "--concurrency", "2", "1", "--max-tokens", "16"]  # fmt: skip


def test_a_run_writes_the_states_and_can_be_resumed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def counted(server, phases, temperature, real=measurement.run_load):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(server.label)
        return real(server, phases, temperature)

    with monkeypatch.context() as broken:
        broken.setattr(measurement, "run_load", counted)
        assert command.main([*arguments, "--repeats", "2"]) == 130
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs", "states.measured.json"]
    assert command.main([*arguments, "--max-tokens", "9", "--resume"]) == 2
    assert "was measured with answers" in capsys.readouterr().out

    assert command.main([*arguments, "--repeats", "2", "--resume"]) == 0
    text = (tmp_path / "out/states.json").read_text()
    document = json.loads(text)
    ones = document["measurements"]
    assert len(ones) == 12 and not (tmp_path / "out/states.measured.json").exists()
    assert [(one["repeat"], one["concurrency"], one["state"]) for one in ones[::3]] == [
        (0, 1, "none"), (0, 2, "base"), (1, 1, "base"), (1, 2, "trained")
    ]  # fmt: skip
    by_state = {one["state"]: one for one in ones if one["concurrency"] == 1}
    for state, one in by_state.items():
        # No peer is faster than its pauses allow. How much slower it is depends on what else this machine does, and so
        # does the time between tokens: those that came while the client waited are read at once.
        assert 0 < one["tokens_per_s"] <= 1 / GAPS[state]
        assert all(one[name] > 0 for name in ("tpot_ms", "otps", "requests_per_s", "ttft_ms"))
    whole = [one for one in document["comparisons"] if one["concurrency"] is None]
    assert [(one["theirs"], one["ratio"] > 0) for one in whole] == [("none", True), ("base", True)]
    output = " ".join(capsys.readouterr().out.split())  # lines end anywhere, by what was measured
    assert "trained head" in output and "eagle-plugin report" in output

    # Neither file says a prompt's text, or where a file of this machine is.
    pages = [text, *(path.read_text() for path in write_report(tmp_path / "out"))]
    assert not any(SECRET in page or str(tmp_path) in page for page in pages)
    assert document["command"][:3] == ["target", "--head", "new"]


def test_without_a_base_head_two_states_are_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}')
    plain = ServerSpec(target=tmp_path, mode="plain")
    specs = state_specs(plain, tmp_path, None, "plugin")
    assert {state: (spec.mode, spec.speculation) for state, spec in specs.items()} == {
        "none": ("plain", "EAGLE3"), "trained": ("plugin", "EAGLE")
    }  # fmt: skip
    assert specs["trained"].environment["EAGLE_POLICY"] == "auto"
    assert state_specs(plain, tmp_path, None, "fixed")["trained"].environment["EAGLE_POLICY"] == "fixed"
    assert state_specs(plain, tmp_path, tmp_path, "builtin")["base"].mode == "builtin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--max-tokens", "4000"], "--max-tokens 4000 is too long"),
        (["--head", "/nowhere"], "no config.json there"),
        (["--out", "{file}/out"], "cannot write"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(
    change: list[str], message: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = [text.format(file=tmp_path / "prompts.jsonl") for text in change]
    assert command.main([*arguments, *change]) == 2
    assert message in " ".join(capsys.readouterr().out.split()) and not (tmp_path / "out/logs").exists()


def test_facts_of_a_head_name_no_folder(tmp_path: Path) -> None:
    recipe = {"head": {"from": "/home/somebody/heads/old"}, "data": [{"url": "s3://bucket/somebody/features"}], "lr": 1}
    manifest = {"format": 1, "kind": "eagle3", "aux_layers": [1], "target": {}, "training": {"recipe": recipe}}
    (tmp_path / "eagle_plugin.json").write_text(json.dumps(manifest))
    (tmp_path / "config.json").write_text("{}")
    facts = head_facts(tmp_path)
    assert facts.training == {"recipe": {"head": {"from": "old"}, "data": [{"url": "features"}], "lr": 1}}
    assert shown_arguments(["/a/b/job/head", "--out", "x/y", "--resume"]) == ["job/head", "--out", "y"]
    weights = facts.weights_sha256
    (tmp_path / "model.safetensors").write_text("other")
    assert head_facts(tmp_path).weights_sha256 != weights


def test_both_engines_tell_how_many_drafts_rounds_accepted() -> None:
    details = {"spec_verify_ct": 5, "spec_correct_drafts_histogram": [3, 1, 1]}
    chunk = SimpleNamespace(sglext={"spec_tokens_details": details})
    assert sglang_server.accepted_drafts(chunk) == (3, 1, 1)
    # 9 tokens after the first one, 3 of them drafted: 6 rounds, of which vLLM counts the 4 that had drafts.
    details = {"num_spec_steps": 4, "num_accepted_draft_tokens": 3, "acceptance_histogram": [2, 1, 1]}
    usage = SimpleNamespace(completion_tokens=10)
    chunk = SimpleNamespace(metrics={"speculative_decoding": details}, usage=usage)
    assert vllm_server.accepted_drafts(chunk) == (4, 1, 1)
    for engine in (sglang_server, vllm_server):
        assert engine.accepted_drafts(SimpleNamespace(usage=None)) is None
