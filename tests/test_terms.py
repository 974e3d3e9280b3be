"""The terms that this project no longer uses are gone, and the lint that says so finds each of them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("lint_terms", ROOT / "tools" / "lint_terms.py")
assert SPEC is not None and SPEC.loader is not None
lint = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lint)

PY, CPP, MD = "eagle_plugin/sglang/drafter.py", "csrc/include/eagle/tree.h", "docs/design.md"

# Where, what is wrong, the term that is found in it, and the right counterpart, in which nothing is found.
SAMPLES = [
    (PY, "def tree_door(): ...", "tree_door", "def tree_checks(): ...  # an indoor path"),
    (CPP, '#include "tree_door.h"', "tree_door", '#include "tree_checks.h"'),
    (PY, "find_law(logits)", "find_law", "find_target_distribution(flaw)"),
    (CPP, "Law law;", "Law", "TargetDistribution p;  // as Zipf's law says"),
    (PY, "SLOT_WORTH = 0.4", "SLOT_WORTH", "SLOT_WEIGHTS = 0.4"),
    (PY, "# what a child is worth", "worth", "# an answer worth keeping"),
    (PY, "paced = Paced(reference)", "Paced", "times = ReferenceTimes(reference); spaced = 1"),
    (PY, "made_up_batch = 1", "made_up_batch", "dummy_batch = 1  # made up for a test"),
    (PY, "hand_over(worker)", "hand_over", "fall_back(worker)"),
    (PY, "staging = buffer()", "staging", "to_device(values)"),
    (PY, "SEAMS = {}", "SEAMS", "CONTRACT = {}"),
    (CPP, "int64_t beam;", "beam", "int64_t topk;"),
    ("eagle_plugin/core/round_start.py", "lanes = 8", "lanes", "padded = 8"),
    ("eagle_plugin/policy/costs.py", "def slope(keys): ...", "keys", "def slope(prefix_tokens): ..."),
    ("eagle_plugin/core/rng.py", "def uniforms(keys): ...", "keys", "def uniforms(rng_keys): ..."),
    ("eagle_plugin/vllm/runner.py", "pending = rows", "pending", "deferred = rows; pending_structured = 1"),
    (PY, "liked = shape", "liked", "best_yield = shape"),
    (MD, "Two seams are pinned.", "seams", "Two names are pinned; it seems so."),
    (PY, "listed = 128", "listed", "top_m = 128"),
    (PY, "# the listed tokens", "listed tokens", "# the files listed below"),
    (CPP, "constexpr int kMaxListed = 128;", "kMaxListed", "constexpr int kMaxTopM = 128;"),
    (PY, "SAMPLED = 2", "SAMPLED", "NUM_SAMPLED = 2; sampled = 1"),
    (PY, "stride = width + 1", "stride", "row = x.stride(0); accept_stride = 4; speculative_output_stride = 3"),
    (PY, "def row(stride: int): ...", "stride", "def row(q_row_stride: int): ..."),
    (PY, "said = output[0]", "said", "tokens = output[0]"),
    (MD, "what the request has\nsaid so far", "said", "what the request has generated so far"),
    (PY, "class PlayedTurn: ...", "PlayedTurn", "class DisplayedTurn: ..."),
    (PY, "def play(): ...", "play", "def playback(): ..."),
    (PY, "# prompts to be played", "played", "# it plays a role in this"),
    (PY, "def deal_rounds(): ...", "deal_rounds", "def ideal(): ...  # how to deal with it"),
    (PY, "# dealt out in rounds", "dealt", "# assigned in rounds"),
    ("eagle_plugin/learning/data/privacy/filter.py", "def open_screen(): ...", "open_screen", "def open_filter(): ..."),
    ("eagle_plugin/learning/data/sources/prompts.py", "class Draft: ...", "Draft", "class RawPrompt: ..."),
    (PY, "numbers = draw()", "numbers", "uniforms = draw()  # numbers with units"),
    (PY, "from eagle_plugin.runtime import numbers", "numbers", "from eagle_plugin.runtime import rng"),
    (PY, "growth = Growth()", "Growth", "builder = TreeBuilder()"),
    (PY, "drafter.grow(batch)", "grow", "drafter.draft(batch); tree.grow_level(table)"),
    (MD, "Tree growth and selection.", "growth", "The trees grow level by level."),
    (PY, "def take_over(): ...", "take_over", "def unsupported(): ..."),
    (PY, "flags_left_alone = []", "flags_left_alone", "unsupported_flags = []"),
    (MD, "What is left alone.", "left alone", "What is left."),
    (PY, "figures = texts", "texts", "stats = responses; figure = plot()"),
    (PY, "def plan(round: Round): ...", "round", "def plan(state: Round): return round(state.share)"),
    (PY, "for round in rounds: ...", "round", "for one in rounds: ..."),
    (PY, "words = chain(4)", "words", "ancestors = chain(4); metadata[keywords]"),
    (PY, '"""Ancestor words [b, W]."""', "Ancestor words", '"""Ancestor bitmasks [b, W]; in other words."""'),
    (MD, "| `--topk` | 4 children a node |", "children a node", "| `--topk` | 4 children per node |"),
    (MD, "It keeps a row a token, for\ntrees.", "a row a token", "It gives a row a token."),
    (MD, "It accepts 1.75 tokens\na round.", "tokens a round", "It accepts 1.75 tokens per round, as a round must."),
    (PY, '"""One typed function an operation."""', "One typed function an operation", '"""One that reads a row."""'),
    (CPP, "// One block a row of logits.", "One block a row", "// One block reads a row of logits."),
    (PY, 'raise ValueError(f"{n} drafted tokens a round")', "tokens a round", 'raise ValueError("of tokens, a round")'),
    (CPP, "// write keys behind\n// L", "behind", "// runs behind a proxy; nothing is left behind"),
    (MD, "Nodes stand in slots.", "stand", "W stands for the width, a stand-in; they understand."),
    (PY, "# the likeliest token", "likeliest", "# the most likely token"),
    (MD, "vLLM keeps the books.", "keeps the books", "vLLM records them."),
    (CPP, "// What is below 2^-40 is nothing.", "is nothing", "// There is nothing to read."),
    (MD, "The flags are left away.", "left away", "The flags are left out."),
    (CPP, "// Checked at the door.", "door", "// Checked outdoors."),
    (MD, "Each keeps the law of the target.", "law", "Zipf's law; the import law (`tests/test_import_law.py`)."),
    (PY, "# the take-over reads flags", "take-over", "# over these flags"),
    (PY, "PlainFigures = 1", "PlainFigures", "figure = 1"),
    (CPP, 'check(x, "wanted one number a row");', "one number a row", 'check(x, "wanted one number per row");'),
    (MD, "See `find_law`.", "find_law", "See `find_target_distribution`."),
    ("tests/engines/test_sampling_law.py", "", "test_sampling_law", ""),
    ("Makefile", "## one thread a process", "one thread a process", "## one thread per process"),
]


def terms(path: str, source: str) -> list[str]:
    return [hit.term for hit in lint.check(path, source + "\n")]


@pytest.mark.parametrize(("path", "wrong", "term", "right"), SAMPLES, ids=[sample[2] for sample in SAMPLES])
def test_a_term_is_found_and_its_replacement_is_not(path: str, wrong: str, term: str, right: str) -> None:
    assert term in terms(path, wrong)
    assert right == "" or terms(path, right) == []


def test_every_rule_has_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [(name, rule) for name in ("NAMES", "PROSE") for rule in getattr(lint, name)]
    for name, rule in rules:
        monkeypatch.setattr(lint, "NAMES", [])
        monkeypatch.setattr(lint, "PROSE", [])
        monkeypatch.setattr(lint, name, [rule])
        assert any(rule.instead == hit.instead for path, wrong, *_ in SAMPLES for hit in lint.check(path, wrong)), rule


def test_the_line_is_the_one_that_ends_the_term() -> None:
    source = 'x = 1\n\n\ndef f():\n    """First.\n\n    Second, 4 children\n    a node.\n    """\n'
    assert [(hit.line, hit.term) for hit in lint.check(PY, source)] == [(8, "children a node")]


def test_code_blocks_and_test_data_are_not_prose() -> None:
    assert terms(MD, "```\n4 children a node\n```\n") == []
    assert terms("tests/core/test_tree.py", 'text = "he said so"\n') == []
    assert terms("tests/core/test_tree.py", '"""As he said."""\n') == ["said"]


def test_the_exit_status(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.md", tmp_path / "good.md"
    bad.write_text("the likeliest\n")
    good.write_text("the most likely\n")
    run = [sys.executable, str(ROOT / "tools" / "lint_terms.py")]
    assert subprocess.run([*run, str(good)]).returncode == 0
    failed = subprocess.run([*run, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 1 and 'bad.md:1: "likeliest": most likely' in failed.stdout
