"""The rows of benchmarks/drafters.py: what is compared with what, and what an earlier document keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.drafters import Document, Measured, Row, kept, kind_of, parse, rows_of, server_name, specs_of
from eagle_plugin.bench.load import Completion
from eagle_plugin.bench.machine import describe_machine
from eagle_plugin.bench.measure import Repeat
from eagle_plugin.bench.outputs import StealCount, write_json
from eagle_plugin.bench.steal import StealWatch
from eagle_plugin.bench.stream_fields import Output
from eagle_plugin.models import head_folder
from eagle_plugin.policy.draft_times import DraftTimes

FACTS = {"engine": "sglang", "target": "t", "head": "h", "kind": "eagle3", "prompts": "mtbench"}
SECONDS = {"plain": 8.0, "5/1/6": 4.0, "5/1/6 looked up": 2.0, "5/4/6": 2.0, "5/4/6 looked up": 1.0}
STEAL = StealCount.of(StealWatch(1))


def measured(seconds: float, text: str) -> Measured:
    """Two answers of 8 tokens in one repeat, 10 rounds that the head drafted in 20 ms."""
    one = Completion("q", Output(text), "stop", 1, 8, 0.1, seconds, (), None)
    return Measured(Repeat((one, one)), DraftTimes(0.02, 10))


@pytest.fixture
def rows() -> list[Row]:
    found = {name: [measured(seconds, "same" if name != "5/4/6" else "other")] * 3 for name, seconds in SECONDS.items()}
    return rows_of(FACTS, parse([]), found, STEAL)


def test_what_is_compared_with_what(rows: list[Row]) -> None:
    by_name = {f"{row.shape}{' looked up' if row.lookup else ''}": row for row in rows}
    assert list(by_name) == list(SECONDS)[1:]
    ratios = {
        name: [None if x is None else x.median for x in (row.over_plain, row.over_chain, row.over_no_lookup)]
        for name, row in by_name.items()
    }
    assert ratios == {
        "5/1/6": [2.0, None, None],
        "5/1/6 looked up": [4.0, None, 2.0],
        "5/4/6": [4.0, 2.0, None],
        "5/4/6 looked up": [8.0, 2.0, 2.0],
    }
    assert {row.draft_ms for row in rows} == {2.0}
    assert [(row.same_text_as_plain, row.answers) for row in rows] == [(6, 6), (6, 6), (0, 6), (6, 6)]


def test_an_earlier_document_keeps_other_rows(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "drafters.json"
    others = [row.model_copy(update={"head": "other"}) for row in rows]
    assert kept(path, rows) == []
    write_json(Document(max_tokens=1, threads=1, machine=describe_machine(), rows=[*rows, *others]), path)
    assert kept(path, rows) == others and kept(path, others[:1]) == [*rows, *others[1:]]
    path.write_text("{}")
    with pytest.raises(ValueError, match="drafters.json is no document of this benchmark"):
        kept(path, rows)


def test_chain_and_tree_have_as_many_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--chain", "5/1/6", "--tree", "3/4/8"])
    assert "--chain 5/1/6 and --tree 3/4/8 differ in nodes" in capsys.readouterr().err
    assert str(parse(["--tree", "3/4/8"]).chain) == "7/1/8"


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_servers_of_a_head(kind: str) -> None:
    folder = head_folder(f"smollm2-135m-instruct-{kind}")
    assert kind_of(folder) == kind
    options = parse(["--engine", "vllm", "--policy", "auto"])
    specs = specs_of(options, Path("target"), folder, kind)
    shapes = {server_name(shape, lookup) for shape in (options.chain, options.tree) for lookup in (False, True)}
    assert set(specs) == {"plain"} | shapes
    assert {spec.environment.get("EAGLE_LOOKUP") for spec in specs.values()} == {None, "on", "off"}
    assert {spec.environment.get("EAGLE_POLICY") for name, spec in specs.items() if name != "plain"} == {"auto"}
    assert len({spec.label for spec in specs.values()}) == 5
