"""End to end on the real model and its head: fp32 greedy text equals plain decoding, trees really are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import accept_length, generate_all, responses, serving, tiny_spec

pytest.importorskip("sglang")
from eagle_plugin.bench.questions import read_questions
from eagle_plugin.models.store import get_model

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HEAD = EXAMPLES / "heads" / "smollm2-135m-instruct-eagle3"
WORDS = ["river", "engine", "garden", "number", "window", "teacher", "planet", "recipe", "bridge"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    target = get_model("smollm2-135m-instruct")
    sizes = {"context_length": 2048, "max_total_tokens": 16384}
    specs = [tiny_spec(target, **sizes), tiny_spec(target, HEAD, (3, 4, 16), **sizes)]
    with serving(specs, tmp_path_factory.mktemp("real")) as running:
        yield running


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.matrix)])
def test_greedy_text_equals_plain_decoding(every, servers):
    """54 prompts x 64 tokens or a quarter of them, eight at a time, so that batches change while trees are drafted."""
    plain, tree = servers
    questions = [prompt.prompt for prompt in read_questions(sorted((EXAMPLES / "prompts").glob("*.jsonl")))]
    questions += [f"Write one sentence about a {word}." for word in WORDS]
    questions += [f"List {count} facts about a {word}." for count, word in enumerate(WORDS, start=2)]
    questions += [f"What rhymes with {word}?" for word in WORDS] + ["Why?", "def add(a, b):", "1, 2, 3, 4,"]
    assert len(questions) >= 50
    questions = questions[::every]
    prompts = [chat(question) for question in questions]
    expected = responses(generate_all(plain, prompts, 64, at_once=8))
    answers = generate_all(tree, prompts, 64, at_once=8)
    different = [q for q, text, answer in zip(questions, expected, answers, strict=True) if answer["text"] != text]
    assert not different
    # Measured about 1.95 at this shape (examples/heads card); far less would mean that drafts are read wrongly.
    assert accept_length(answers) > 1.7
