"""Which cells are measured, with which questions, on which servers."""

from pathlib import Path

import pytest

from eagle_plugin.bench.cells import CONCURRENCIES, Cell, make_plan, requests_of
from eagle_plugin.bench.prompt_kinds import long_questions, questions_of, select_asks
from eagle_plugin.bench.servers import child_environment
from eagle_plugin.bench.serving import trace_command
from eagle_plugin.bench.serving.command import parse
from eagle_plugin.bench.serving.configs import CONFIGS, config_specs
from eagle_plugin.bench.serving.trace import trace_specs
from eagle_plugin.bench.spec import ServerSpec
from eagle_plugin.core.shape import Shape


def test_by_default_every_number_of_clients_and_a_few_cells_more():
    plan = make_plan()
    main = [cell for cell, repeats in plan.repeats.items() if repeats == 4]
    assert main == [Cell(count, 0.0, "mixed") for count in CONCURRENCIES]
    extra = {cell for cell, repeats in plan.repeats.items() if repeats == 3}
    assert {cell.temperature for cell in extra} == {0.0, 0.7} and {cell.prompts for cell in extra} == {"mixed", "long"}
    assert plan.max_concurrency == 32


def test_named_clients_keep_a_part_of_the_default_cells():
    plan = make_plan(concurrencies=[1, 64])
    assert set(plan.repeats) == {
        Cell(1, 0.0, "mixed"), Cell(64, 0.0, "mixed"), Cell(1, 0.7, "mixed"), Cell(1, 0.0, "long"),
    }  # fmt: skip


def test_named_temperatures_and_prompts_are_combined():
    plan = make_plan([2, 8], [0.0, 1.0], ["code", "long"], repeats=7)
    assert len(plan.repeats) == 8 and set(plan.repeats.values()) == {7}
    assert make_plan(temperatures=[0.7], concurrencies=[2]).repeats == {Cell(2, 0.7, "mixed"): 4}


def test_all_cells_are_measured_once_before_any_is_measured_again():
    turns = list(make_plan().turns())
    assert [repeat for repeat, _, _ in turns] == sorted(repeat for repeat, _, _ in turns)
    assert len(turns) == sum(make_plan().repeats.values()) == len(set(turns))


def test_a_quick_plan_is_much_smaller():
    def tokens(plan):
        answers = {cell: requests_of(cell.concurrency, cell.prompts) * plan.max_tokens(cell) for cell in plan.repeats}
        return sum(answers[cell] * repeats for cell, repeats in plan.repeats.items())

    assert tokens(make_plan(quick=True)) < tokens(make_plan()) / 8


def test_the_cache_holds_all_requests_of_every_cell():
    assert make_plan([32]).cache_tokens() >= 32 * (119 + 40)
    assert make_plan([4], prompts=["long"]).cache_tokens() >= 4 * (2043 + 120)


def test_every_client_has_more_than_one_question():
    for clients in (1, 2, 3, 4, 5, 8, 32, 100):
        assert requests_of(clients) >= 2 * clients and requests_of(clients, "long") == 3 * clients


def test_answers_differ_in_length_and_repeats_in_questions():
    questions = questions_of("mixed", Path("any"))
    assert [question.group for question in questions[:6]] == ["chat", "code", "maths"] * 2
    first, second = (select_asks(questions, repeat * 6, 6, 64) for repeat in (0, 1))
    assert [ask.max_tokens for ask in first] == [32, 62, 43, 73, 55, 36]
    lengths = sorted(ask.max_tokens for ask in select_asks(questions, 7, 32, 64))
    assert all(b - a <= 3 for a, b in zip([32, *lengths], [*lengths, 80], strict=True))  # evenly, from 32 to 80
    assert not {ask.question.id for ask in first} & {ask.question.id for ask in second}
    assert len(select_asks(questions, 20, 40, 64)) == 40
    assert {question.group for question in questions_of("maths", Path("any"))} == {"maths"}


def test_long_questions_have_so_many_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    questions = long_questions(tmp_path, tokens=50)
    assert len(questions) > 300 and len({question.prompt for question in questions}) > 300
    for question in questions[:20]:
        part, _, task = question.prompt.rpartition("\n\n")
        assert len(tokenizer.encode(part).ids) == 50 and task.endswith(".")


def test_long_questions_need_the_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        questions_of("long", tmp_path)


def spec(engine):
    return ServerSpec(target=Path("target"), mode="plain", head=Path("head"), engine=engine)


def test_the_servers_of_each_engine():
    sglang, vllm = config_specs(spec("sglang")), config_specs(spec("vllm"))
    assert tuple(sglang) == CONFIGS and tuple(vllm) == tuple(c for c in CONFIGS if c != "builtin_tree")
    assert sglang["builtin_chain"].shape == Shape(2, 1, 3) and sglang["builtin_tree"].shape.topk > 1
    assert len({one.label for one in sglang.values()}) == 5  # each has its own log
    assert tuple(config_specs(spec("vllm"), ["plugin", "plain"])) == ("plain", "plugin")


def test_only_the_policy_differs_between_fixed_and_plugin():
    specs = config_specs(spec("sglang"))
    policies = {
        config: child_environment(one, {"EAGLE_POLICY": "caller's"})["EAGLE_POLICY"] for config, one in specs.items()
    }
    assert policies["fixed"] == "fixed" and policies["plugin"] == "auto"
    assert specs["fixed"].shape == specs["plugin"].shape


def test_a_trace_has_each_fixed_shape_once():
    specs = trace_specs(spec("sglang"), Shape(2, 4, 8), [Shape(1, 1, 2), Shape(2, 4, 8)])
    assert list(specs) == ["plain", "fixed 2/4/8", "fixed 1/1/2", "plugin"]
    assert specs["fixed 1/1/2"].shape == Shape(1, 1, 2) and specs["plugin"].environment["EAGLE_POLICY"] == "auto"
    assert len({one.label for one in specs.values()}) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "0"], "'0' was given, wanted a number of at least 1"),
        (["--temperatures", "-1"], "-1"),
        (["--temperatures", "nan"], "'nan' was given"),
        (["--repeats", "x"], "'x' was given"),
        (["--prompts", "poems"], "poems"),
        (["--configs", "turbo"], "turbo"),
    ],
)
def test_bad_options_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert message in capsys.readouterr().err


def test_the_help_tells_what_is_measured(capsys):
    for read, parts in ((parse, CONFIGS), (trace_command.parse, ["--shapes", "EAGLE_POLICY"])):
        with pytest.raises(SystemExit):
            read(["--help"])
        text = capsys.readouterr().out
        assert all(part in text for part in parts) and "eagle-plugin bench-serving" in text
