"""`eagle-plugin doctor` on start commands of SGLang: the verdict of its real parser and of the plugin's own checks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("sglang")
import dflash_models
from doctor_verdicts import sglang_flags, sglang_verdicts
from dspark_models import tiny_dspark
from mtp_models import mimo_target
from tiny_checkpoints import read_config, write_config
from tiny_models import tiny_llama

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.shapes import CPU_SHAPE
from eagle_plugin.runtime.startup import engine_serves, plugin_serves
from eagle_plugin.runtime.verdict import Verdict

pytestmark = pytest.mark.slow  # SGLang is imported


@pytest.fixture(scope="module")
def commands(tiny_target: Path, tiny_eagle3: Path, tiny_eagle2: Path, tmp_path_factory) -> dict[str, list[str]]:
    other = tiny_llama(tmp_path_factory.mktemp("other"), hidden=96, heads=6, kv_heads=2)
    drafter = dflash_models.tiny_dflash(tmp_path_factory.mktemp("drafter") / "drafter", tiny_target)
    markov = tiny_dspark(tmp_path_factory.mktemp("markov") / "markov", tiny_target)
    predicting = mimo_target(tmp_path_factory.mktemp("predicting"))
    several = tmp_path_factory.mktemp("several") / "target"
    shutil.copytree(predicting, several)
    write_config(several, **read_config(several) | {"num_nextn_predict_layers": 2})
    shape = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"]
    return {
        "served": sglang_flags(tiny_target, tiny_eagle3, "EAGLE3", *shape),
        "eagle2": sglang_flags(tiny_target, tiny_eagle2, "EAGLE"),
        "MTP layer": sglang_flags(predicting, None, "NEXTN"),
        "MTP layer by its path": sglang_flags(predicting, predicting, "EAGLE"),
        "several layers": sglang_flags(several, None, "NEXTN"),
        "no layer": sglang_flags(tiny_target, None, "NEXTN"),
        "block drafter": sglang_flags(tiny_target, drafter, "DFLASH"),
        "Markov head": sglang_flags(tiny_target, markov, "DSPARK"),
        "flag": sglang_flags(tiny_target, tiny_eagle3, "EAGLE3", "--speculative-accept-threshold-single", "0.9"),
        "plain": sglang_flags(tiny_target, None, None),
        "draft model": sglang_flags(tiny_target, tiny_target, "STANDALONE"),
        "wrong head": sglang_flags(other, tiny_eagle3),
        "no such flag": sglang_flags(tiny_target, tiny_eagle3, "EAGLE3", "--treee", "1"),
        "help": ["--help"],
        "no such head": sglang_flags(tiny_target, tiny_target / "nowhere"),
        "block drafter, flag": sglang_flags(
            tiny_target, drafter, "DFLASH", "--speculative-accept-threshold-acc", "0.9"
        ),
    }


def test_verdicts(commands: dict[str, list[str]], tiny_eagle3: Path) -> None:
    found = dict(zip(commands, sglang_verdicts(list(commands.values())), strict=True))
    serves = {name: one.serves for name, one in found.items()}
    assert [serves.pop(name) for name in ("served", "eagle2", "block drafter", "Markov head")] == ["plugin"] * 4
    assert found["Markov head"].sentence == plugin_serves("DSPARK", Shape(8, 4, 9), "native")
    assert [serves.pop(name) for name in ("flag", "draft model", "plain")] == ["engine", "engine", "plain"]
    check_mtp_layers(found, serves)
    assert set(serves.values()) == {"nobody"}

    served = found["served"]
    assert served.sentence == plugin_serves("EAGLE3", Shape(3, 2, 6), "native")
    assert served.plugin.startswith("eagle-plugin ") and "SGLang loads it" in served.plugin
    memory = {cost.what: cost for cost in served.memory}
    stored = (tiny_eagle3 / "model.safetensors").stat().st_size
    weights = memory["the head's weights"].bytes
    assert weights is not None and 0.9 * stored < weights <= stored  # float32, and a header
    assert memory["the head's keys and values"].bytes == 4096 * 2 * 2 * 16 * 4
    logits = memory["logits of the target for the trees"]
    assert logits.bytes is not None and logits.bytes % (6 * 512 * 4) == 0

    reason = "--speculative-accept-threshold-single 0.9: it changes the output's distribution"
    assert found["flag"].reasons == [reason] and found["flag"].sentence == engine_serves("EAGLE3", "SGLang", [reason])
    assert found["flag"].changes == [
        "leave out --speculative-accept-threshold-single, or give it a value that is served"
    ]
    assert "--speculative-algorithm EAGLE3" in found["plain"].changes[0]
    assert found["draft model"].sentence.startswith("STANDALONE: SGLang's own speculation serves it")
    for name, message in (
        ("wrong head", "but the target's hidden_size is 96"),
        ("no such flag", "SGLang does not take the flags: unrecognized arguments: --treee 1"),
        ("help", "starts no server"),
        ("no such head", "nowhere is no folder on this disk"),
        ("block drafter, flag", "DFLASH speculative decoding is not supported by CpuSRTPlatform"),
    ):
        assert message in found[name].sentence and "\n" not in found[name].sentence, found[name]
    (why,) = found["block drafter, flag"].warnings
    assert why.startswith("DFLASH is not served on a CPU: --speculative-accept-threshold-acc 0.9: it changes")


def check_mtp_layers(found: dict[str, Verdict], serves: dict[str, str]) -> None:
    """Of targets that draft by a layer of their own; takes them out of `serves`."""
    for name in ("MTP layer", "MTP layer by its path"):
        assert serves.pop(name) == "plugin" and found[name].sentence == plugin_serves("EAGLE", CPU_SHAPE, "native")
        memory = {cost.what: cost for cost in found[name].memory}
        assert "among those of the target" in memory["the MTP layer's weights"].note
        assert memory["the MTP layer's keys and values"].bytes == 4096 * 2 * 5 * 64 * 4
    assert serves.pop("several layers") == serves.pop("no layer") == "engine"
    assert found["several layers"].reasons[0].startswith("MTP layer MiMoMTP: 2 layers, of which each drafts one")
    (missing,) = found["no layer"].reasons
    assert missing.startswith("--speculative-draft-model-path is not given, and SGLang finds no draft layers")


def test_a_plugin_that_is_not_let_in(commands: dict[str, list[str]]) -> None:
    (dropped,) = sglang_verdicts([commands["served"]], SGLANG_PLUGINS="other")
    assert dropped.serves == "engine" and dropped.sentence.startswith("SGLANG_PLUGINS is 'other' and does not name")
    assert dropped.changes == ["SGLANG_PLUGINS=other,eagle_plugin, or unset it"]
    assert any("eagle_sglang_cpu" in line for line in dropped.warnings)
    assert not any("logits" in cost.what for cost in dropped.memory)  # of the trees
    (off,) = sglang_verdicts([commands["served"]], EAGLE_PLUGIN="0")
    assert off.serves == "engine" and off.sentence == "eagle-plugin is switched off by EAGLE_PLUGIN=0"
    assert off.changes == ["unset EAGLE_PLUGIN"] and off.plugin.endswith("SGLang loads it; EAGLE_PLUGIN=0")
