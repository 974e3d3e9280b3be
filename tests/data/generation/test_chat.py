import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from eagle_plugin.learning.data.generation.chat import ChatRenderer, RenderedTurn, UntrainableTurn
from eagle_plugin.learning.data.masks import MaskReport, show_masks
from eagle_plugin.learning.data.render import main, render_prompt
from eagle_plugin.learning.data.rows import DataError, TokenRow, read_rows
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt
from eagle_plugin.learning.data.target_files import load_tokenizer, stop_token_ids
from eagle_plugin.models import get_model

# A template with tools and thoughts: earlier turns lose their thoughts, and the prompt for an answer begins one.
THINKING = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}\
{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
NO_SYSTEM = """\
{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Counts the turns at the top, so that every answer changes the text before it.
REWRITING = "turns: {{ messages | length }}\n" + NO_SYSTEM
# Only conversations that begin with a 2 have the count: the probe has none, so that its marks can be checked.
TAGGED = REWRITING.replace("turns", "{% if messages[0].content[0] == '2' %}turns").replace(
    "length }}\n", "length }}{% endif %}"
)
TAGGED = TAGGED.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n",
)

TURNS = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "2+2? Say 4 , or say   return x"},
    {"role": "assistant", "content": "4 "},
    {"role": "user", "content": "def f(x):\n"},
    {"role": "assistant", "content": "  return x"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "\n\nYou are welcome.\n"},
]


@pytest.fixture(scope="module")
def target():
    return get_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def loaded(target):
    return load_tokenizer(target)


@pytest.fixture
def tokenizer(loaded, monkeypatch):
    monkeypatch.setattr(loaded, "chat_template", loaded.chat_template)  # restored after tests that change it
    return loaded


def render(tokenizer, messages, template=None, tools=None, **options):
    if template:
        tokenizer.chat_template = template
    return list(ChatRenderer(tokenizer, [2], **options).render_turns(messages, tools))


def check_row(tokenizer, turn: RenderedTurn, text: str, stop="<|im_end|>"):
    """True for every row: some ids are trained on and not all, and they decode to the answer and its stop token."""
    assert turn.prompt_ids and turn.response_ids
    assert tokenizer.decode(turn.response_ids) == text + stop


def test_every_turn_is_a_row_of_the_answer_and_its_stop_token(tokenizer):
    turns = render(tokenizer, TURNS)
    answers = [turn["content"] for turn in TURNS if turn["role"] == "assistant"]
    assert [turn.turn for turn in turns] == [0, 1, 2] and all(turn.stopped for turn in turns)
    for turn, text in zip(turns, answers, strict=True):
        check_row(tokenizer, turn, text)
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in answers]
    assert sum(len(turn.response_ids) for turn in turns) == sum(map(len, encoded)) + 3
    # The prompt is what the server would read, although the second answer is also a part of the first question.
    for place, turn in zip((2, 4, 6), turns, strict=True):
        served = tokenizer.apply_chat_template(TURNS[:place], tokenize=False, add_generation_prompt=True)
        assert turn.prompt_ids == tokenizer(served, add_special_tokens=False).input_ids


def test_a_mask_of_ones_fails_the_check(tokenizer):
    turn = render(tokenizer, TURNS)[0]
    ones = dataclasses.replace(turn, prompt_ids=[], response_ids=turn.prompt_ids + turn.response_ids)
    with pytest.raises(AssertionError):
        check_row(tokenizer, ones, "4 ")


def test_tokenising_together_would_have_lost_the_boundary(tokenizer):
    turn = render(tokenizer, TURNS)[1]
    whole = tokenizer.apply_chat_template(TURNS[:5], tokenize=False)
    together = tokenizer(whole, add_special_tokens=False).input_ids
    assert together[: len(turn.prompt_ids)] != turn.prompt_ids  # "\n" and the answer's spaces merged


def test_thoughts_are_trained_on_where_they_were_recorded(tokenizer):
    messages = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A", "reasoning_content": "hm"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B"},
    ]
    first, second = render(tokenizer, messages, THINKING)
    check_row(tokenizer, first, "hm\n</think>\n\nA")
    assert tokenizer.decode(first.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    check_row(tokenizer, second, "B")  # no thought was recorded: the answer begins right after the role
    assert tokenizer.decode(second.prompt_ids).endswith("<|im_start|>assistant\n")
    assert "hm" not in tokenizer.decode(second.prompt_ids)


def test_tool_calls_are_answers_and_their_results_are_not(tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [call]},  # without content, as it is recorded
        {"role": "tool", "content": "sunny", "name": "weather"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    first, second = render(tokenizer, messages, THINKING, tools=[{"name": "weather"}])
    # "<think>" and "<tool_call>" begin alike: the cut does not fall between "<t" and "ool_call>".
    check_row(tokenizer, first, '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
    check_row(tokenizer, second, "It is sunny.")
    prompt = tokenizer.decode(second.prompt_ids)
    assert "sunny" in prompt and prompt.startswith('<|im_start|>system\n[{"name": "weather"}]')


def test_system_text_joins_the_user_turn_where_the_template_rejects_it(tokenizer):
    turns = render(tokenizer, TURNS, NO_SYSTEM)
    assert tokenizer.decode(turns[0].prompt_ids).startswith("<|im_start|>user\nBe terse.\n\n2+2?")
    check_row(tokenizer, turns[2], TURNS[-1]["content"])


def test_a_template_that_rewrites_history_gives_no_row(tokenizer):
    assert {turn.reason for turn in render(tokenizer, TURNS, REWRITING)} == {"template rewrites history"}


def test_marks_of_the_template_are_used_only_if_they_are_right(tokenizer):
    messages = TURNS[1:5]
    _, second = render(tokenizer, messages, TAGGED)
    check_row(tokenizer, second, "  return x")
    served = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(second.prompt_ids) == served
    wrong = TAGGED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    assert {turn.reason for turn in render(tokenizer, messages, wrong)} == {"template rewrites history"}


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("template", [None, THINKING, NO_SYSTEM, NO_SYSTEM.replace("m.content", "m.content | trim")])
def test_a_cut_answer_differs_from_a_finished_one_by_its_ending_only(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    renderer = ChatRenderer(tokenizer, [2])
    messages = [*TURNS[1:4], {"role": "assistant", "content": "The answer is a"}]
    *_, finished = render_prompt(Prompt("a", "test", messages=messages), renderer)
    first, cut = render_prompt(Prompt("a", "test", messages=messages, finish="length"), renderer)
    assert (cut.prompt_ids, finished.response_ids) == (finished.prompt_ids, [*cut.response_ids, 2])
    assert tokenizer.decode(cut.response_ids) == "The answer is a"
    assert (first.finish, first.response_ids[-1]) == ("recorded", 2)  # what the target ended earlier has its end
    assert (finished.finish, cut.finish) == ("recorded", "length")


def test_of_a_cut_thought_its_mark_is_not_closed(tokenizer):
    messages = [TURNS[1], {"role": "assistant", "content": "", "reasoning_content": "hm, so the"}]
    tokenizer.chat_template = THINKING
    (cut,) = ChatRenderer(tokenizer, [2]).render_turns(messages, cut=True)
    assert tokenizer.decode(cut.response_ids) == "hm, so the"
    tokenizer.chat_template = NO_SYSTEM  # which does not write thoughts
    (hidden,) = ChatRenderer(tokenizer, [2]).render_turns(messages, cut=True)
    assert hidden == UntrainableTurn(0, "cut, and the template does not show where")


def test_of_a_cut_character_and_a_cut_call_nothing_is_learned(tokenizer):
    renderer = ChatRenderer(tokenizer, [2])
    answer = {"role": "assistant", "content": "Trees: \ufffd"}
    (cut,) = renderer.render_turns([TURNS[1], answer], cut=True)
    assert tokenizer.decode(cut.response_ids) == "Trees: "
    call = {"type": "function", "function": {"name": "find", "arguments": '{"q": "tr'}}
    (open_call,) = renderer.render_turns([TURNS[1], {**answer, "tool_calls": [call]}], cut=True)
    assert open_call == UntrainableTurn(0, "cut, and the template does not show where")


def test_an_answer_that_a_stop_string_may_have_ended_has_no_stop_token(tokenizer):
    renderer = ChatRenderer(tokenizer, [2])
    prompt = Prompt("a", "test", messages=TURNS[1:3], sampling={"stop": ["\n"]})
    (row,) = render_prompt(prompt, renderer)
    assert row.response_ids == ids_of(tokenizer, "4 ") and row.finish == "recorded"
    (row,) = render_prompt(dataclasses.replace(prompt, sampling={}), renderer)
    assert row.response_ids == [*ids_of(tokenizer, "4 "), 2]


def test_a_cut_raw_answer_says_so(tokenizer):
    raw = Prompt("a", "test", prompt="Once upon", response={"text": " a time", "finish": "length"})
    (row,) = render_prompt(raw, ChatRenderer(tokenizer, [2]))
    assert (row.response_ids, row.finish) == (ids_of(tokenizer, " a time"), "length")


def test_of_a_capture_that_says_its_target_only_the_answer_is_a_row(tokenizer):
    """The client sent the turns before it, perhaps of another target; the control does not say its target."""
    renderer, prompt = ChatRenderer(tokenizer, [2]), Prompt("a", "test", messages=TURNS)
    rows = list(render_prompt(dataclasses.replace(prompt, target={"name": "t"}), renderer))
    assert [getattr(row, "id", None) for row in rows] == [None, None, "a#2"]
    assert {row.reason for row in rows[:2]} == {"earlier turn, sent by the client"}
    assert [row.id for row in render_prompt(prompt, renderer)] == ["a#0", "a#1", "a#2"]


def test_template_variables_of_the_request_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ mood }}\n" + NO_SYSTEM
    prompt = Prompt("a", "test", messages=TURNS[1:3], sampling={"chat_template_kwargs": {"mood": "cheerful"}})
    (row,) = render_prompt(prompt, ChatRenderer(tokenizer, [2]))
    assert tokenizer.decode(row.prompt_ids).startswith("cheerful\n<|im_start|>user")
    tokenizer.chat_template = "{{ reasoning_effort }}\n" + NO_SYSTEM
    odd = {"chat_template_kwargs": "cheerful", "reasoning_effort": "low"}
    (row,) = render_prompt(Prompt("a", "test", messages=TURNS[1:3], sampling=odd), ChatRenderer(tokenizer, [2]))
    assert tokenizer.decode(row.prompt_ids).startswith("low\n<|im_start|>user")


@pytest.mark.parametrize(
    ("sampling", "written"),
    [
        ({}, "- -"),
        ({"reasoning_effort": "none"}, "False False"),
        ({"reasoning_effort": "low"}, "True True"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True False"),
    ],
)
def test_the_effort_switches_thinking_as_in_the_engines(tokenizer, sampling, written):
    tokenizer.chat_template = "{{ enable_thinking | default('-') }} {{ thinking | default('-') }}\n" + NO_SYSTEM
    (row,) = render_prompt(Prompt("a", "test", messages=TURNS[1:3], sampling=sampling), ChatRenderer(tokenizer, [2]))
    assert tokenizer.decode(row.prompt_ids).startswith(f"{written}\n<|im_start|>user")


def test_long_rows_lose_the_end_of_the_answer_and_never_of_the_prompt(tokenizer):
    whole = render(tokenizer, TURNS)[2]
    prompt, answer = len(whole.prompt_ids), len(whole.response_ids)
    cut = render(tokenizer, TURNS, max_length=prompt + answer - 1)[2]
    assert cut.response_ids == whole.response_ids[:-1] and not cut.stopped
    assert render(tokenizer, TURNS, max_length=prompt + 1)[2] == UntrainableTurn(2, "prompt too long")


def test_a_tokenizer_without_a_template_serves_raw_prompts_only(tokenizer):
    tokenizer.chat_template = None
    renderer = ChatRenderer(tokenizer, [2])
    raw = Prompt("a", "test", prompt="Once upon", response={"text": " a time"})
    (row,) = render_prompt(raw, renderer)
    assert tokenizer.decode(row.response_ids) == " a time" and row.finish == "recorded"
    (row,) = render_prompt(Prompt("b", "test", prompt_ids=[5, 6], response={"token_ids": [7, 8, 2, 9]}), renderer)
    assert (row.prompt_ids, row.response_ids) == ([5, 6], [7, 8, 2])
    with pytest.raises(DataError, match="no chat template"):
        list(renderer.render_turns(TURNS))


def test_stop_tokens_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    with_both = tmp_path / "generation_config.json"
    with_both.write_text('{"eos_token_id": [7, 5]}')
    assert stop_token_ids(tmp_path) == [5, 7]
    with_both.unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="eos_token_id"):
        stop_token_ids(tmp_path)


def row(prompt, response, name="r"):
    return TokenRow(name, "test", [1] * prompt, [2] * response, "stop")


def check_masks(rows: list[TokenRow], allow: bool = False) -> MaskReport:
    report = MaskReport()
    for row in rows:
        report.add(row, allow=allow)
    report.check_mean(allow=allow)
    return report


def test_masks_that_cannot_be_right_stop_the_work():
    report = check_masks([row(50, 50), row(75, 25)])
    assert report.mean == 0.375 and sum(report.histogram) == 2
    for rows, message in (
        ([row(50, 50), row(0, 80, "bad")], "row bad trains on 80 of its 80 tokens"),
        ([row(50, 0)], "trains on 0 of its 50"),
        ([row(1, 99)] * 3, "99.0% of the tokens"),
        ([row(99, 1)] * 3, "1.0% of the tokens"),
    ):
        with pytest.raises(DataError, match=message):
            check_masks(rows)
        assert check_masks(rows, allow=True).rows == len(rows)


def test_the_command_renders_recorded_answers(target, tokenizer, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    unanswered = Prompt("q", "test", messages=TURNS[:2])
    prompts.write_text(format_prompt(Prompt("p", "test", "val", messages=TURNS)) + format_prompt(unanswered))
    assert main([str(prompts), "--target", str(target), "--out", str(out)]) == 0
    rows = list(read_rows(out))
    assert [(row.id, row.split, row.finish) for row in rows] == [(f"p#{n}", "val", "recorded") for n in range(3)]
    printed = capsys.readouterr()
    assert "no recorded answer" in printed.out and "Be terse." in printed.err
    # All of a row as response: nothing is written, and the old file is not changed.
    before = out.read_bytes()
    prompts.write_text(json.dumps({"id": "x", "source": "test", "prompt_ids": [], "response": {"token_ids": [3, 4]}}))
    with pytest.raises(DataError, match="trains on 2 of its 2"):
        main([str(prompts), "--target", str(target), "--out", str(out)])
    assert out.read_bytes() == before and sorted(path.name for path in Path(tmp_path).iterdir()) == [
        "prompts.jsonl", "rows.jsonl",
    ]  # fmt: skip


def test_the_sample_shows_what_is_trained_on_in_green(tokenizer):
    turn = render(tokenizer, TURNS)[0]
    text = show_masks(TokenRow("r", "test", turn.prompt_ids, turn.response_ids, "stop"), tokenizer)
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as capture:
        console.print(text)
    assert "\x1b[32m4 <|im_end|>" in capture.get()
