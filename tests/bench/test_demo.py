"""The whole demo against servers that answer with a known speed: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from eagle_plugin.bench import demo, equality, speed
from eagle_plugin.bench.engines import ENGINES
from eagle_plugin.bench.measure import EarlyStop
from eagle_plugin.bench.servers import ServerError
from eagle_plugin.bench.spec import ServerSpec

PEER = Path(__file__).parents[1] / "support/peer.py"
GAPS = {"plain": 0.03, "builtin": 0.02, "plugin": 0.01}  # seconds per token


@pytest.fixture
def arguments(any_head: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a demo whose servers are peers."""

    def command(spec: ServerSpec, port: int) -> list[str]:
        return [sys.executable, str(PEER), str(port), "--gap", str(GAPS[spec.mode])]

    monkeypatch.setattr(demo, "EQUALITY_TOKENS", 8)
    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], command=command))
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    lines = [{"id": f"q{i}", "group": f"g{i // 5}", "prompt": "differ" if i == 5 else "hello"} for i in range(10)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"--target": "target", "--head": "head", "--prompts": "questions.jsonl", "--out": "out"}
    return [*(arg for flag, name in options.items() for arg in (flag, str(tmp_path / name))), "--max-tokens", "8"]


def test_a_demo_ends_early_and_writes_table_report_and_picture(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "EarlyStop", partial(EarlyStop, relative_width=10))  # other work disturbs the speeds
    assert demo.main(arguments) == 1
    document = json.loads((tmp_path / "out/demo.json").read_text())
    text = capsys.readouterr().out
    settings = document["settings"]
    assert 4 <= settings["repeats"] < settings["max_repeats"] == 5
    assert re.fullmatch(r"the quartiles of plugin over plain are \d+\.\d% of its median apart", settings["stop_reason"])
    assert f"{settings['repeats']} of at most 5 repeats: {settings['stop_reason']}; --thorough makes all" in text
    spread = document["spread"]
    for mode, gap in GAPS.items():  # no server can be faster than its pauses, however busy the machine is
        assert 0 < spread[f"{mode}_tokens_per_s"]["q1"] <= spread[f"{mode}_tokens_per_s"]["q3"] <= 1 / gap
    for name in ("speedup_vs_plain", "speedup_vs_builtin"):
        assert document[name] == pytest.approx(spread[name]["median"], abs=1e-3)
        assert f"{spread[name]['median']:.2f}x" in text
    assert document["equality"]["compared"] == document["prompts"] == 8
    assert document["equality"]["different"] == ["q5"] and not document["greedy_equal"]
    assert "texts differ in fp32: q5" in text
    # Log lines: each with its time, in the order of the work.
    order = ["starting", "is ready", "warming up", "first answers", "measuring: 20%", "repeats:"]
    order += [f"{document['speedup_vs_plain']:.2f}x plain decoding, .* EAGLE3$", "written to", "greedy answers"]
    order += [f"{document['speedup_vs_plain']:.2f}x plain decoding, .*; 7 of 8 greedy texts"]
    places = [re.search(rf"^\[ *\d+ s\] .*{part}", text, re.MULTILINE) for part in order]
    assert all(places), list(zip(order, places, strict=True))
    assert [place.start() for place in places] == sorted(place.start() for place in places)
    assert text.count("plain decoding") == 7  # two pairs of columns, bars, table, once and twice in the two sentences
    shown = document["shown"]
    assert [one["title"] for one in shown[0]["answers"]] == ["plain decoding", "eagle-plugin"] and len(shown) == 2
    assert (tmp_path / "out/demo.svg").read_text().count("<tspan>") >= 2
    with Image.open(tmp_path / "out/demo.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 500


def test_thorough_makes_every_repeat_and_compares_every_question(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GAPS", dict.fromkeys(GAPS, 0.002))  # no speed is looked at
    assert demo.main([*arguments, "--thorough", "--max-tokens", "4"]) == 1
    document = json.loads((tmp_path / "out/demo.json").read_text())
    assert document["settings"]["repeats"] == document["settings"]["max_repeats"] == 5
    assert document["settings"]["thorough"] and document["equality"]["compared"] == 10
    assert "5 repeats, as many as were wanted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "code", "different", "empty"),
    [
        pytest.param(["think", "call", "reason"], 0, [], [], marks=pytest.mark.matrix),
        pytest.param(["think differ", "call differ", "think"], 1, ["q0", "q1"], [], marks=pytest.mark.matrix),
        (["quiet", "think", "hello"], 0, [], ["q0"]),
        (["quiet", "quiet", "quiet"], 1, [], ["q0", "q1", "q2"]),  # nothing was compared
    ],
)
def test_answers_without_text_are_compared_by_what_they_have(
    arguments, tmp_path, capsys, monkeypatch, asked, code, different, empty
):
    monkeypatch.setattr(sys.modules[__name__], "GAPS", dict.fromkeys(GAPS, 0.002))  # no speed is looked at
    lines = [{"id": f"q{i}", "group": f"g{i}", "prompt": prompt} for i, prompt in enumerate(asked)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert demo.main([*arguments, "--quick", "--max-tokens", "4"]) == code
    equality = json.loads((tmp_path / "out/demo.json").read_text())["equality"]
    assert (equality["different"], equality["empty"]) == (different, empty)
    assert (equality["equal"], equality["compared"]) == (3 - len(different) - len(empty), 3 - len(empty))
    printed = capsys.readouterr().out
    assert ("which prove nothing: " + ", ".join(empty) in " ".join(printed.split())) == bool(empty)


def test_what_was_measured_is_kept_if_the_servers_of_the_comparison_do_not_start(
    arguments, tmp_path, capsys, monkeypatch
):
    def fail(*_):
        raise ServerError("float32 does not fit\nsecond line")

    def interrupt(*_):
        assert json.loads((tmp_path / "out/demo.json").read_text())["equality"]["not_compared"]
        assert (tmp_path / "out/demo.png").exists() and "against engine" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[__name__], "GAPS", dict.fromkeys(GAPS, 0.002))  # no speed is looked at
    monkeypatch.setattr(equality, "compare_greedy", fail)
    given = [*arguments, "--quick", "--max-tokens", "4"]
    assert demo.main(given) == 1
    report = json.loads((tmp_path / "out/demo.json").read_text())
    assert report["equality"]["not_compared"] == "float32 does not fit" and not report["greedy_equal"]
    assert report["equality"]["compared"] == 0 and report["speedup_vs_plain"] > 0
    printed = capsys.readouterr().out
    assert "no comparison in fp32: float32 does not fit" in printed and "no texts were compared" in printed
    monkeypatch.setattr(equality, "compare_greedy", interrupt)
    (tmp_path / "out/demo.json").unlink()
    assert demo.main(given) == 130 and (tmp_path / "out/demo.json").exists()


@pytest.mark.parametrize("flags", [(), pytest.param(("--", "--quantization", "fp8"), marks=pytest.mark.matrix)])
def test_a_quantised_target_is_not_compared(arguments, tmp_path, capsys, monkeypatch, flags):
    """No engine serves such weights in fp32."""
    monkeypatch.setattr(sys.modules[__name__], "GAPS", dict.fromkeys(GAPS, 0.002))  # no speed is looked at
    monkeypatch.setattr(equality, "compare_greedy", None)
    if not flags:
        config = {"quantization_config": {"quant_method": "mxfp4"}}
        (tmp_path / "target/config.json").write_text(json.dumps(config))
    assert demo.main([*arguments, "--quick", "--max-tokens", "4", *flags]) == 0
    report = json.loads((tmp_path / "out/demo.json").read_text())
    assert report["equality"]["not_compared"] == equality.QUANTISED and not report["greedy_equal"]
    assert "the target is quantised" in " ".join(capsys.readouterr().out.split())


def test_thorough_and_quick_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        demo.parse(["--thorough", "--quick"])
    assert "not allowed with" in capsys.readouterr().err


def test_without_matplotlib_the_demo_says_what_to_install(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys.modules[__name__], "GAPS", dict.fromkeys(GAPS, 0.002))  # no speed is looked at
    assert demo.main([*arguments, "--quick", "--max-tokens", "4"]) == 0  # q5 is not among the three questions
    assert not (tmp_path / "out/demo.png").exists() and (tmp_path / "out/demo.json").exists()
    assert "no picture: matplotlib.figure is not installed" in capsys.readouterr().out
