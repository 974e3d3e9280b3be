"""Recorded answers of another target than the one that a head is for are refused, by the digests of its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured_traffic import answered, chat, exchange

from eagle_plugin.learning.data.prepare import main as prepare
from eagle_plugin.learning.data.privacy.filter import PrivacyFilter, PrivacySettings
from eagle_plugin.learning.data.render import main as render
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.sources.prompts import read_prompts
from eagle_plugin.learning.data.target_identity import DIGESTS, target_digests
from eagle_plugin.learning.data.traffic.segments import SegmentWriter, segments_of
from eagle_plugin.learning.data.traffic.writer import TrafficWriter, describe
from eagle_plugin.traffic.served import ServedTarget

ANSWER = "The air scatters blue light more than red light."
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant> {% endif %}"
)


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A target that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "tiny"))


def capture(served: dict[str, str] | None, folder: Path, question: str = "Why is the sky blue?") -> list[str]:
    """The files of a capture with one answer of this target."""
    writer = TrafficWriter(PrivacyFilter(PrivacySettings("off")), SegmentWriter(folder, 10**8), served)
    writer.write(exchange(chat(question), answered(ANSWER)))
    return [str(path) for path in segments_of(folder)]


def keep(files: list[str], out: Path, *options: str) -> int:
    return prepare([*files, "--keep-responses", "--privacy", "off", "--out", str(out), *options])


def change_weights(target: Path) -> None:
    path = next(iter(target.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_template(target: Path) -> None:
    (target / "chat_template.jinja").write_text(TEMPLATE)


def change_config(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))


def test_a_record_says_which_target_answered_and_prepare_keeps_it(target: Path, tmp_path: Path) -> None:
    served = describe(ServedTarget.of(str(target)))
    assert served == {"name": "tiny", **target_digests(target)} and set(served) == {"name", *DIGESTS}
    files = capture(served, tmp_path / "capture")
    assert json.loads(Path(files[0]).read_text())["target"] == served
    assert keep(files, tmp_path / "kept", "--target", str(target)) == 0
    (prompt,) = read_prompts(tmp_path / "kept")
    assert prompt.target == served and prompt.messages[-1]["content"] == ANSWER
    assert prepare([*files, "--privacy", "off", "--out", str(tmp_path / "asked")]) == 0
    (prompt,) = read_prompts(tmp_path / "asked")
    assert prompt.target is None and prompt.messages[-1]["role"] == "user"


@pytest.mark.parametrize(
    ("change", "differs"),
    [(change_weights, "weights_sha256"), (change_template, "template_sha256"), (change_config, "config_sha256")],
)
def test_answers_of_a_changed_target_are_refused(
    change: Callable[[Path], None], differs: str, target: Path, tmp_path: Path
) -> None:
    """Its name is the same; the control is the target as it was."""
    files, kept, rows = capture(describe(ServedTarget.of(str(target))), tmp_path / "c"), tmp_path / "k", tmp_path / "r"
    assert keep(files, kept, "--target", str(target)) == 0
    command = [str(kept), "--target", str(target), "--out", str(rows)]
    assert render(command) == 0 and [row.id[-2:] for row in read_rows(rows)] == ["#0"]
    change(target)
    for out in (kept, rows):
        out.unlink()
    sentence = rf"was answered by tiny, and the target .*tiny is another one \({differs} differ\); .*data generate"
    with pytest.raises(DataError, match=sentence):
        keep(files, kept, "--target", str(target))
    assert not kept.exists()
    assert keep(files, kept) == 0  # without --target nothing is compared; rendering does it
    with pytest.raises(DataError, match=sentence):
        render(command)
    assert not rows.exists()
    assert render([*command, "--any-target"]) == 0
    with_new = capture(describe(ServedTarget.of(str(target))), tmp_path / "new", "What is new?")
    both = tmp_path / "both"
    assert keep([*files, *with_new], both, "--target", str(target), "--skip-other-targets") == 0
    assert [prompt.messages[0]["content"] for prompt in read_prompts(both)] == ["What is new?"]
    prompts_only = [*files, "--privacy", "off", "--out", str(tmp_path / "prompts")]
    assert prepare(prompts_only) == 0  # for `data generate`


def test_a_capture_without_a_target_is_told_and_used(target: Path, tmp_path: Path, capfd: Any) -> None:
    files, kept = capture(None, tmp_path / "c"), tmp_path / "k"
    assert "target" not in json.loads(Path(files[0]).read_text())
    assert keep(files, kept, "--target", str(target)) == 0
    told = "warning: 1 recorded answers do not say which target gave them: make sure that it is the target"
    assert told in capfd.readouterr().err
    assert render([str(kept), "--target", str(target), "--out", str(tmp_path / "r")]) == 0
    assert told in capfd.readouterr().err


def test_a_name_alone_is_compared_and_told(target: Path, tmp_path: Path, capfd: Any) -> None:
    """The target is not a folder with a config.json: of one file, for instance."""
    served = describe(ServedTarget.of(str(target / "tokenizer.json")))
    assert (
        served == {"name": "tokenizer.json"} and "have the name of the target, and no digests" in capfd.readouterr().err
    )
    other = capture({"name": "other"}, tmp_path / "other")
    with pytest.raises(DataError, match=r"was answered by other, and the target .*tiny is another one \(name differ\)"):
        keep(other, tmp_path / "k", "--target", str(target))
    assert keep(capture({"name": "tiny"}, tmp_path / "c"), tmp_path / "k", "--target", str(target)) == 0
    assert "1 recorded answers have the name of their target without digests" in capfd.readouterr().err


def test_a_target_without_answers_is_refused(target: Path, tmp_path: Path) -> None:
    files = capture(None, tmp_path / "c")
    with pytest.raises(DataError, match="--target is for answers, and without --keep-responses none is kept"):
        prepare([*files, "--target", str(target), "--out", str(tmp_path / "k")])


def test_a_template_and_a_tokenizer_of_the_server_count(target: Path, tiny_target: Path, tmp_path: Path) -> None:
    """As its flags name them; the same text as a file and as a flag is the same template."""
    own = target_digests(target)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    by_file = describe(ServedTarget.of(str(target), chat_template=str(file)))
    by_text = describe(ServedTarget.of(str(target), chat_template=TEMPLATE))
    change_template(target)
    assert by_file == by_text == {"name": "tiny", **target_digests(target)} != {"name": "tiny", **own}
    (target / "tokenizer.json").write_text("{}")
    of_other = describe(ServedTarget.of(str(target), tokenizer=str(tiny_target)))
    assert of_other == {"name": "tiny", **own}
