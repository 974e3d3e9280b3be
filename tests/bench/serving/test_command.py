"""The whole benchmark and the whole trace against servers that answer with a known speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, ImageColor
from serving_reports import serving_report

from eagle_plugin.bench import measurement, preparation, steal, turns
from eagle_plugin.bench.closed_loop import Ask, Phase
from eagle_plugin.bench.drawing import PictureError
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.measurement import Measured, resume_from
from eagle_plugin.bench.questions import Question
from eagle_plugin.bench.serving import command
from eagle_plugin.bench.serving.picture import COLOURS, draw_serving
from eagle_plugin.bench.serving.report import ServingMeasurement
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.prediction_errors import CLASSES
from eagle_plugin.policy.report import MARK, PolicyReport

PEER = Path(__file__).parents[2] / "support/peer.py"
GAP = 0.003  # seconds per token


@pytest.fixture
def arguments(any_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a run whose servers are peers, on a machine without steal."""

    def launch(spec: ServerSpec, port: int) -> list[str]:
        return [sys.executable, str(PEER), str(port), "--gap", str(GAP)]

    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], command=launch))
    monkeypatch.setattr(steal.StealWatch.__init__, "__defaults__", (lambda text: None, 0.05, lambda: steal.Ticks(1, 0)))
    monkeypatch.setattr(preparation, "busy_percent", lambda: 0.0)
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return ["--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), "--out", str(tmp_path / "out")]


def test_a_run_writes_table_report_and_picture(arguments, tmp_path, capsys):
    options = [*arguments, "--quick", "--concurrency", "1", "2", "--prompts", "code", "--repeats", "2"]
    assert command.main(options) == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["logs", "serving.json", "serving.png"]
    document = json.loads((out / "serving.json").read_text())
    assert [(row["concurrency"], row["prompts"]) for row in document["rows"]] == [(1, "code"), (2, "code")]
    assert len(document["measurements"]) == 2 * 2 * 5
    for row in document["rows"]:
        # A window has whole answers, and no peer is faster than its pauses allow.
        assert 0 < row["plugin"] < row["concurrency"] / GAP and row["ratio_vs_best_alternative"] > 0
        assert row["cpu_seconds_per_token"]["plugin"] >= 0 and row["repeats"] == 2
        assert row["steal"] == 0.0
    # Repeat 1 and then repeat 2, each with both cells; another server is the first one each time.
    firsts = [(one["repeat"], one["concurrency"], one["config"]) for one in document["measurements"][::5]]
    assert firsts == [(0, 1, "plain"), (0, 2, "builtin_chain"), (1, 1, "builtin_chain"), (1, 2, "builtin_tree")]
    text = capsys.readouterr().out
    assert "measuring: " in text and "plugin / best" in text and "geometric mean" in text
    with Image.open(out / "serving.png") as picture:
        assert picture.size[0] > 500


def test_an_interrupted_run_is_continued(arguments, tmp_path, monkeypatch, capsys):
    options = [
        *arguments,
        "--quick",
        "--concurrency",
        "1",
        "--prompts",
        "chat",
        "--repeats",
        "2",
        "--configs",
        "plain",
        "plugin",
    ]
    asked: list[str] = []

    def counted(server, phases, temperature, real=measurement.run_load):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(server.label)
        return real(server, phases, temperature)

    with monkeypatch.context() as broken:
        broken.setattr(measurement, "run_load", counted)
        assert command.main(options) == 130
    partial = tmp_path / "out/serving.measured.json"
    before = json.loads(partial.read_text())["measurements"]
    assert len(before) == 3 and not (tmp_path / "out/serving.json").exists()

    assert command.main([*options, "--quick", "--threads", "7", "--resume"]) == 2
    assert "was measured with threads" in capsys.readouterr().out
    assert command.main([*options, "--resume"]) == 0
    after = json.loads((tmp_path / "out/serving.json").read_text())["measurements"]
    assert after[:3] == before and len(after) == 4 and not partial.exists()


def test_a_broken_file_is_not_continued(tmp_path):
    path = tmp_path / "serving.measured.json"
    kind = Measured[ServingMeasurement]
    assert resume_from(path, {"threads": "1"}, kind) == kind(identity={"threads": "1"})
    path.write_text("{")
    with pytest.raises(ValueError, match="--resume: .* cannot be read .*remove it"):
        resume_from(path, {}, kind)


def test_a_folder_that_cannot_be_written_ends_the_run_before_a_server_starts(arguments, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command.main([*arguments, "--prompts", "chat", "--out", str(tmp_path / "file/out")]) == 2
    assert "cannot write" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_server_that_the_engine_lacks_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], builtin_shape=ENGINES["vllm"].builtin_shape))
    assert command.main([*arguments, "--prompts", "chat", "--configs", "builtin_tree"]) == 2
    assert "sglang has no builtin_tree; name others" in capsys.readouterr().out


def test_a_trace_has_phases_and_totals(arguments, tmp_path, capsys):
    assert command.main([*arguments, "--trace", "--quick", "--shapes", "1/1/2", "--repeats", "2"]) == 0
    document = json.loads((tmp_path / "out/trace.json").read_text())
    servers = document["servers"]
    assert list(servers) == ["plain", "fixed 2/4/8", "fixed 1/1/2", "plugin"]
    for name, server in servers.items():
        assert [phase["clients"] for phase in server["phases"]] == [1, 8, 1]
        rates = [phase["tokens_per_s"]["median"] for phase in server["phases"]]
        assert min(rates) > 0 and max(rates) < 8 / GAP
        assert (server["ratio_vs_plain"] is None) == (server["shape"] is None) == (name == "plain")
    assert document["best_fixed"].startswith("fixed") and document["ratio_vs_best_fixed"]["median"] > 0
    assert (tmp_path / "out/trace.png").stat().st_size > 10_000
    assert "over the trace" in capsys.readouterr().out


def test_a_picture_needs_plain_decoding(tmp_path):
    report = serving_report()
    draw_serving(report, tmp_path / "all.png")
    with Image.open(tmp_path / "all.png") as picture:
        colours = {ImageColor.getrgb(colour) for colour in COLOURS.values()}
        assert colours <= {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    alone = report.model_copy(deep=True)
    for row in alone.rows:
        row.spread.ratio_vs_plain = {}
    with pytest.raises(PictureError, match="measure plain"):
        draw_serving(alone, tmp_path / "alone.png")
    assert [path.name for path in tmp_path.iterdir()] == ["all.png"]


def test_errors_of_predictions_are_those_of_the_load(monkeypatch):
    """What the server's log had before the load, of warm-up and of other cells, does not count."""
    before, after = (tuple(number if place == 3 else 0 for place in range(CLASSES)) for number in (5, 12))
    report = PolicyReport("auto", Shape(2, 4, 8), PLAIN)
    logs = [f"{MARK}{report._replace(errors=errors).as_json()}\n" for errors in (before, after)]
    server = SimpleNamespace(
        endpoint=None,
        resume=lambda: None,
        pause=lambda: None,
        cpu_clock=lambda: lambda: 0.0,
        log_text=lambda: logs.pop(0),
    )
    monkeypatch.setattr(turns, "warm_up", lambda *given, **named: None)
    monkeypatch.setattr(turns, "flush_prefix_cache", lambda endpoint: None)
    monkeypatch.setattr(turns, "ask_in_phases", lambda *given: [])
    question = Question(id="q", group="chat", prompt="hello")
    loaded = turns.run_load(server, [Phase(1, [Ask(question, 4)])], 0.0)  # type: ignore[arg-type]
    assert loaded.prediction_errors[3] == 7 == sum(loaded.prediction_errors)
