"""The target's responses: the same in batches and alone, kept in the cache, cut at stop tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_decoder import plain_greedy
from transformers import AutoModelForCausalLM

from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row
from eagle_plugin.learning.data.target_files import load_tokenizer
from eagle_plugin.learning.evaluate.responses import chat_ids, generate_responses, held_out_rows, responses_at

PROMPTS = [[0, 40, 41], [0, 99, 120, 77, 5, 60, 61], [0, 200]]


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


def rows(*prompts: list[int]) -> list[TokenRow]:
    return [TokenRow(str(i), "chat", ids, [], "", "val") for i, ids in enumerate(prompts)]


def test_batched_answers_are_plain_answers(model: Any) -> None:
    """Padding changes nothing, nor do the target's own settings of generation; order is kept, and an answer ends with
    its first stop token."""
    model.generation_config.repetition_penalty = 5.0
    responses = generate_responses(model, rows(*PROMPTS), 0.0, 12, 0, [1])
    assert [t.response_ids for t in responses] == [plain_greedy(model, ids, 12) for ids in PROMPTS]
    assert {(t.finish, t.temperature) for t in responses} == {("length", 0.0)}
    stop = responses[1].response_ids[4]
    stopped = generate_responses(model, rows(PROMPTS[1]), 0.0, 12, 0, [1, stop])[0]
    assert stopped.response_ids == responses[1].response_ids[: responses[1].response_ids.index(stop) + 1]
    assert stopped.finish == "stop"


def test_sampled_answers_depend_on_the_seed_alone(model: Any) -> None:
    before = torch.get_rng_state()
    a, b, c = (generate_responses(model, rows(*PROMPTS), 1.5, 12, seed, [1]) for seed in (0, 0, 1))
    assert a == b != c
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers are unchanged


def test_answers_are_written_once(
    model: Any, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps the response that it has at this temperature; another setting is another file."""
    monkeypatch.setenv("EAGLE_CACHE_DIR", str(tmp_path))
    recorded = replace(rows(PROMPTS[0])[0], response_ids=[7, 8, 9, 10], temperature=0.0)
    asked = [recorded, *rows(*PROMPTS[1:]), replace(recorded, temperature=0.7), replace(recorded, temperature=None)]
    calls = []

    def target() -> Any:
        calls.append(1)
        return model

    def written(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[TokenRow]:
        return responses_at(target, tiny_target, asked, dtype=dtype, temperature=0.0, tokens=tokens, seed=seed)

    def answers(tokens: int) -> list[list[int]]:
        done = written(tokens)
        assert [(t.id, t.prompt_ids) for t in done] == [(t.id, t.prompt_ids) for t in asked]
        return [t.response_ids for t in done]

    own = plain_greedy(model, PROMPTS[0], 6)
    assert answers(6) == [[7, 8, 9, 10], *(plain_greedy(model, ids, 6) for ids in PROMPTS[1:]), own, own]
    assert answers(6)[0] == [7, 8, 9, 10] and len(calls) == 1
    assert [len(a) for a in answers(3)] == [3] * 5 and len(calls) == 2
    again = [replace(row, id=f"{row.id}-again", source="other") for row in asked]
    done = responses_at(target, tiny_target, again, dtype=torch.float32, temperature=0.0, tokens=3)
    assert [(t.id, t.source) for t in done] == [(t.id, "other") for t in again] and len(calls) == 2
    written(6, seed=1)
    written(6, dtype=torch.bfloat16)
    assert len(calls) == 4 and len(list((tmp_path / "texts").iterdir())) == 4


def test_held_out_rows(tmp_path: Path) -> None:
    """Val rows where there are any, the first of each source."""
    train = [replace(row, id=f"t{row.id}", split="train") for row in rows(*PROMPTS)]
    val = [replace(row, id=f"{source}{row.id}", source=source) for source in ("chat", "code") for row in rows(*PROMPTS)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(map(format_row, [*train, *val])))  # type: ignore[arg-type]
    assert [row.id for row in held_out_rows(file, 2)] == ["chat0", "chat1", "code0", "code1"]
    file.write_text("".join(map(format_row, train)))  # type: ignore[arg-type]
    assert [row.id for row in held_out_rows(file, 2)] == ["t0", "t1"]
    file.write_text("")
    with pytest.raises(DataError, match="holds no rows"):
        held_out_rows(file, 2)


def test_prompts_are_rendered_as_a_server_does(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(tiny_target)
    assert tokenizer.decode(chat_ids(tokenizer, "hello")) == "<s>user: hello\nassistant:"
    tokenizer.chat_template = None
    assert tokenizer.decode(chat_ids(tokenizer, "hello")) == "hello"
