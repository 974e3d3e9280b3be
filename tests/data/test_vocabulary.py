import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row
from eagle_plugin.learning.data.target_files import read_vocab_size
from eagle_plugin.learning.data.vocabulary import (
    choose_draft_vocabulary,
    count_responses,
    coverage,
    load_draft_vocabulary,
    main,
    save_draft_vocabulary,
)


def row(ids, prompt_ids=(9,), split="train"):
    return TokenRow("r", "test", list(prompt_ids), list(ids), "stop", split)


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 4), min_size=4, max_size=40),
    size=st.integers(2, 50),
    always=st.sets(st.integers(0, 3), max_size=2),
)
def test_the_most_frequent_are_chosen_ties_go_to_the_lower_id(counts, size, always):
    chosen = choose_draft_vocabulary(torch.tensor(counts), size, sorted(always)).tolist()
    assert len(chosen) == min(size, len(counts)) and chosen == sorted(set(chosen)) and always <= set(chosen)
    # Written the slow way: one after the other, the best that is left.
    expected, left = set(always), set(range(len(counts))) - always
    while len(expected) < len(chosen):
        best = max(left, key=lambda token: (counts[token], -token))
        expected.add(best)
        left.remove(best)
    assert set(chosen) == expected


def test_only_responses_are_counted():
    counts = count_responses([row([1, 1, 3]), row([3])], 10)
    assert counts.tolist() == [0, 2, 0, 2, 0, 0, 0, 0, 0, 0]
    assert coverage(counts, torch.tensor([0, 1])) == 0.5


def test_a_token_of_another_target_is_refused():
    with pytest.raises(DataError, match="token 10, wanted ids below 10"):
        count_responses([row([10])], 10)
    with pytest.raises(DataError, match="wanted at least 2"):
        choose_draft_vocabulary(torch.zeros(10, dtype=torch.int64), 1, [2, 3])
    with pytest.raises(DataError, match="stop token 10"):
        choose_draft_vocabulary(torch.zeros(10, dtype=torch.int64), 4, [10])


def test_the_file_comes_back_and_a_wrong_one_is_refused(tmp_path):
    path, ids, counts = tmp_path / "v.safetensors", torch.tensor([1, 4]), torch.arange(5)
    save_draft_vocabulary(path, ids, counts)
    assert [part.tolist() for part in load_draft_vocabulary(path)] == [[1, 4], [0, 1, 2, 3, 4]]
    save_draft_vocabulary(path, torch.tensor([4, 1]), counts)
    with pytest.raises(DataError, match="not ascending"):
        load_draft_vocabulary(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="no draft vocabulary"):
        load_draft_vocabulary(path)


def test_the_size_of_a_target_whose_file_leaves_it_out(tmp_path):
    """As Gemma 3 does: it is the default of the class."""
    architectures, inner = ["Gemma3ForConditionalGeneration"], {"model_type": "gemma3_text", "hidden_size": 64}
    config = {"model_type": "gemma3", "architectures": architectures, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocab_size(tmp_path) == 262208
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(DataError, match="has vocab_size None, wanted a positive whole number"):
        read_vocab_size(tmp_path)


def test_the_command_counts_training_rows_and_reports_the_held_out_ones(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 20, "eos_token_id": [19]}')
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(map(format_row, [row([5, 5, 6]), row([5, 7], split="val")])))
    out = tmp_path / "v.safetensors"
    assert main([str(rows), "--target", str(tmp_path), "--size", "3", "--out", str(out)]) == 0
    assert load_draft_vocabulary(out)[0].tolist() == [5, 6, 19]
    printed = capsys.readouterr().out
    assert "100.00%" in printed and "50.00%" in printed
    assert main([str(rows), "--target", str(tmp_path), "--size", "21", "--out", str(out)]) == 0
    assert load_draft_vocabulary(out)[0].tolist() == list(range(20))  # a target with fewer tokens: all of them
