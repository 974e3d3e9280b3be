"""Whatever a chat template does: the recorded answer is in the row as it was recorded, or the turn has a reason."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_plugin.learning.data.generation.chat import ChatRenderer, RenderedTurn, UntrainableTurn
from eagle_plugin.learning.data.render import main, render_prompt
from eagle_plugin.learning.data.sources.conversation import normalise_messages
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt
from eagle_plugin.learning.data.target_files import load_tokenizer
from eagle_plugin.models import get_model

PLAIN = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ CONTENT }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
OPENING{% endif %}"""
THOUGHTFUL = "<think>\nseven plus two\n</think>\n\nNine."
CALL = "{% for c in m.tool_calls %}<call>{{ CALL }}</call>{% endfor %}"


def template(content: str = "m.content", opening: str = "", call: str = "c.function | tojson") -> str:
    text = PLAIN.replace("CONTENT", content).replace("OPENING", opening)
    return text.replace("<|im_end|>", CALL.replace("CALL", call) + "<|im_end|>")


@pytest.fixture(scope="module")
def target() -> Path:
    return get_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    return load_tokenizer(target)


def render(tokenizer: Any, chat_template: str, *answers: Any, stop: int = 2, **more: Any) -> list[Any]:
    tokenizer.chat_template = chat_template
    messages: list[dict[str, Any]] = []
    for answer in answers:
        messages += [{"role": "user", "content": "7+2?"}]
        messages += [answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}]
    return list(ChatRenderer(tokenizer, [stop]).render_turns(messages, **more))


def texts(tokenizer: Any, turn: RenderedTurn) -> tuple[str, str]:
    assert isinstance(turn, RenderedTurn), turn
    return tokenizer.decode(turn.prompt_ids), tokenizer.decode(turn.response_ids)


STRIPS = "m.content.split('</think>')[-1]"
WRAPS = "m.content | replace('</think>', '</thought>')"


@pytest.mark.parametrize("content", [STRIPS, STRIPS + " | trim", WRAPS, "m.content | upper"])
@pytest.mark.parametrize("cut", [False, True])
def test_thoughts_in_a_text_are_trained_where_the_template_takes_them_out(tokenizer, content, cut):
    (turn,) = render(tokenizer, template(content), THOUGHTFUL, cut=cut)
    prompt, response = texts(tokenizer, turn)
    assert prompt.endswith("<|im_start|>assistant\n") and response == THOUGHTFUL + ("" if cut else "<|im_end|>")


def test_an_opening_mark_that_the_prompt_has_is_not_repeated(tokenizer):
    for recorded in (THOUGHTFUL, THOUGHTFUL.removeprefix("<think>\n")):  # with a closing mark alone, as it was written
        (turn,) = render(tokenizer, template(STRIPS, opening="<think>\n"), recorded)
        prompt, response = texts(tokenizer, turn)
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        assert response == "seven plus two\n</think>\n\nNine.<|im_end|>"
    (turn,) = render(tokenizer, template(STRIPS, opening="<think>\n"), THOUGHTFUL.replace("<think>\n", "<think> "))
    assert turn == UntrainableTurn(0, "template changes the answer")  # two openings that do not fit


def test_white_space_of_an_answer_is_kept_where_the_template_trims(tokenizer):
    (turn,) = render(tokenizer, template("m.content | trim"), "  return x\n")
    assert texts(tokenizer, turn)[1] == "  return x\n<|im_end|>"


def test_what_the_template_leaves_out_has_a_reason(tokenizer):
    changed = [UntrainableTurn(0, "template changes the answer")]
    thought = {"role": "assistant", "content": "Nine.", "reasoning_content": "seven plus two"}
    assert render(tokenizer, template(), thought) == changed
    call = {"function": {"name": "clock", "arguments": {}}}
    silent = PLAIN.replace("CONTENT", "m.content").replace("OPENING", "")
    assert render(tokenizer, silent, {"role": "assistant", "content": "One moment.", "tool_calls": [call]}) == changed
    assert render(tokenizer, template("'***'"), "Nine.") == changed
    assert render(tokenizer, template(), "") == [UntrainableTurn(0, "empty answer")]


def test_an_answer_that_goes_on_after_a_stop_token_has_a_reason(tokenizer):
    within, after = render(tokenizer, template(), "Write <|im_end|> at the end.", "Nine.<|im_end|>\n")
    assert within == UntrainableTurn(0, "stop token inside of the answer")
    assert texts(tokenizer, after)[1] == "Nine.<|im_end|>"


@pytest.mark.parametrize("arguments", [{"x": 3}, '{"x": 3}'])
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("c.function.name + c.function.arguments", 'find{"x": 3}'),
        ("c.function.arguments", None),  # an object would be written as Python writes it, and the name is not there
        ("c.function.name ~ ' ' ~ c.function.arguments", 'find {"x": 3}'),
        ("c.function.name + (c.function.arguments | tojson)", 'find{"x": 3}'),
        ("c.function.name ~ c.function.arguments['x']", "find3"),
    ],
)
def test_arguments_have_the_form_that_the_template_wants(tokenizer, call, wanted, arguments):
    stored = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": arguments}}]}
    _, recorded = normalise_messages([{"role": "user", "content": "7+2?"}, stored], keep_responses=True)
    first, second = render(tokenizer, template(call=call), recorded, "Nine.")
    if wanted is None:
        assert first == UntrainableTurn(0, "template changes the answer")
    else:
        assert texts(tokenizer, first)[1] == f"<call>{wanted}</call><|im_end|>"
    assert texts(tokenizer, second)[1] == "Nine.<|im_end|>"  # the answer after it is not lost


def test_the_end_of_a_turn_is_found_where_no_stop_token_says_it(tokenizer):
    (turn,) = render(tokenizer, template(), "Nine.", stop=0)  # <|endoftext|> alone
    assert texts(tokenizer, turn)[1] == "Nine.<|im_end|>" and turn.stopped
    assert ChatRenderer(tokenizer, [0]).end_of_turn == "<|im_end|>"
    assert ChatRenderer(tokenizer, [2]).end_of_turn is None
    text_only = template().replace("<|im_start|>", "### ").replace("<|im_end|>", "\n\n")
    (turn,) = render(tokenizer, text_only, "Nine, of course.")
    assert texts(tokenizer, turn)[1] == "Nine, of course." and not turn.stopped  # nothing says that the target ended it


DATED = "{{ strftime_now('%d %b %Y') }}\n" + template()


def test_a_template_that_writes_the_date_gets_that_of_the_record(tokenizer):
    tokenizer.chat_template = DATED
    renderer = ChatRenderer(tokenizer, [2])
    messages = [{"role": "user", "content": "7+2?"}, {"role": "assistant", "content": "Nine."}]
    prompt = Prompt("a", "test", messages=messages, date="2025-02-03")
    for pinned, wanted in ((None, "03 Feb 2025"), (datetime.date(2024, 5, 6), "06 May 2024")):
        (row,) = render_prompt(prompt, renderer, pinned)
        assert tokenizer.decode(row.prompt_ids).startswith(wanted + "\n")
    assert renderer.writes_date


def test_the_command_says_what_it_could_not_know(target, tokenizer, tmp_path, capsys, monkeypatch):
    tokenizer.chat_template = DATED
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("eagle_plugin.learning.data.render.load_tokenizer", lambda folder: tokenizer)
    monkeypatch.setattr("eagle_plugin.learning.data.render.stop_token_ids", lambda folder: [0])
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    chats = [
        [{"role": "user", "content": "7+2?"}, {"role": "assistant", "content": "Nine."}],
        [{"role": "user", "content": "7+2?"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}],
    ]
    lines = [Prompt(name, "test", messages=chat) for name, chat in zip("ab", chats, strict=True)]
    prompts.write_text("".join(map(format_prompt, lines)))
    command = [str(prompts), "--target", str(target), "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert "ends an answer with <|im_end|>, which is no eos_token_id" in said
    assert "writes the date, and 2 prompts do not say when they were answered" in said and "--date" in said
    assert "template changes the answer" in printed.out and "first: b#0" in printed.out
    assert main([*command, "--date", "2025-02-03"]) == 0
    assert "writes the date" not in capsys.readouterr().err
    (row,) = map(json.loads, out.read_text().splitlines())
    assert tokenizer.decode(row["prompt_ids"]).startswith("03 Feb 2025\n")
    with pytest.raises(SystemExit):
        main([*command, "--date", "2024-13-45"])
    assert "'2024-13-45' is not a day, wanted YYYY-MM-DD" in capsys.readouterr().err
