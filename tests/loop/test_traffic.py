"""The traffic of the loop at a real server: one pass leaves the answers, and the hidden states of each of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_forks import ForkedServer

from eagle_plugin.learning.data import collect
from eagle_plugin.learning.data.rows import DataError, TokenRow, format_row, read_rows
from eagle_plugin.learning.data.store.feature_store import FeatureStore
from eagle_plugin.learning.loop import server as loop_server
from eagle_plugin.learning.loop import traffic
from eagle_plugin.learning.loop.prompts import LoopError

pytest.importorskip("sglang")


@pytest.mark.server
def test_one_pass_records_answers_and_states_and_continues_after_a_kill(
    tmp_path: Path, tiny_target: Path, tiny_eagle3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer whose states were lost with the server is there: it is not asked again, its states are computed."""
    lost = TokenRow("p-0#0", "own", [5, 9, 40], list(range(60, 76)), "length", "train", 0.0)
    (tmp_path / "recorded.jsonl").write_text(format_row(lost) + format_row(lost)[:30])  # a kill cut the second line
    prompts = [
        {"id": f"p-{i}", "source": "own", "split": "val" if i == 1 else "train"}
        | {"messages": [{"role": "user", "content": f"question {i}"}], "sampling": {"temperature": 1.0}}
        for i in range(5)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    monkeypatch.setattr(loop_server, "Server", ForkedServer)
    traffic.record_traffic(tiny_target, tiny_eagle3, tmp_path, "sglang", 16, 3)

    rows = {row.id: row for row in read_rows(tmp_path / "recorded.jsonl")}
    assert rows["p-0#0"] == lost and rows.keys() == {f"p-{i}#0" for i in range(5)}
    assert {row.temperature for row in rows.values()} == {0.0}  # greedy, whatever the prompt says
    store = FeatureStore(tmp_path / "features/recorded")  # refuses a store that is not whole
    assert {entry.id: entry.split for entry in store.entries} == {row.id: row.split for row in rows.values()}
    for entry in store.entries:
        document, row = store.read(entry), rows[entry.id]
        assert document.ids.tolist() == row.prompt_ids + row.response_ids
        assert int(document.mask.sum()) == len(row.response_ids) == 16
        assert document.last[:-1].any(dim=1).all() and document.aux is not None
        assert bool(document.last[-1].any()) == (entry.id == "p-0#0")  # a prefill knows the last state too


def test_what_is_missing_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is trained on a part of the traffic; a server that is gone says so itself."""
    server = SimpleNamespace(url="http://127.0.0.1:9", check_alive=lambda when: asked.append(when))
    monkeypatch.setattr(traffic, "plugin_server", lambda *_: nullcontext(server))
    monkeypatch.setattr(collect, "main", lambda _: 1)
    asked: list[str] = []
    with pytest.raises(LoopError, match="not every prompt has an answer"):
        traffic.record_traffic(tmp_path, tmp_path, tmp_path, "sglang", 16, 3)
    monkeypatch.undo()
    monkeypatch.setattr(traffic, "plugin_server", lambda *_: nullcontext(server))
    with pytest.raises(DataError, match="no server writes into"):
        traffic.record_traffic(tmp_path, tmp_path, tmp_path, "sglang", 16, 3)
    assert asked == ["while it answered prompts"]
