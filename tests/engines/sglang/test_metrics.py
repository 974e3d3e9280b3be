"""Our metrics in SGLang: on a real server against what its answers say about their rounds, and which rounds count."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from sampling_requests import SHAPE
from serving import accept_length, generate_all

pytest.importorskip("sglang")
from eagle_plugin.bench.servers import Server
from eagle_plugin.common.metric_registry import forget
from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy.chooser import ShapeChooser
from eagle_plugin.policy.log import PolicyLog
from eagle_plugin.policy.report import shape_of
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.runtime.round_metrics import REJECTED_ROUNDS, RejectionWatch
from eagle_plugin.sglang.metrics import RoundCounter
from eagle_plugin.sglang.round_result import RoundResult

STEPS, _, NODES = SHAPE  # of the server `plugin`
PROMPTS = ["tree root leaf", "the quick brown fox", "a", "one two three", "x = y", "hello"]


def exported(url: str) -> dict[str, float]:
    """Our metrics by name, with the label of depth or bucket after it."""
    found = {}
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("eagle_plugin:"):
            name, _, rest = line.removeprefix("eagle_plugin:").partition("{")
            labels, _, number = rest.rpartition("} ")
            pairs = dict(pair.split("=", 1) for pair in labels.split(","))
            assert pairs["model_name"] and pairs["tp_rank"] == '"0"'
            label = pairs.get("depth") or pairs.get("le") or pairs.get("shape")
            found[name + (" " + label.strip('"') if label else "")] = float(number)
    return found


@pytest.mark.server
def test_metrics_are_those_of_the_rounds(plugin: Server) -> None:
    before = exported(plugin.url)
    answers = generate_all(plugin, PROMPTS, 40, at_once=3)
    found = {name: value - before.get(name, 0.0) for name, value in exported(plugin.url).items()}
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    kept = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    by_shape = {shape_of(name.split()[1]): n for name, n in found.items() if name.startswith("shape_rounds_total ")}
    drafted = rounds - by_shape.get(PLAIN, 0)
    assert sum(by_shape.values()) == rounds and all(shape.width <= NODES for shape in by_shape)
    assert found["verify_rounds_total"] == found["accept_length_count"] == drafted
    assert found["accepted_tokens_total"] == kept and found["accept_length_sum"] == kept + drafted
    assert found["drafted_tokens_total"] == sum(n * (shape.width - 1) for shape, n in by_shape.items())
    at_depth = [found[f"accepted_at_depth_total {depth}"] for depth in range(1, STEPS + 1)]
    assert sum(at_depth) == kept and sorted(at_depth, reverse=True) == at_depth
    assert at_depth[-1] > 0  # some paths were kept whole, and some drafts not at all
    assert at_depth[0] <= drafted and kept < found["drafted_tokens_total"]
    for name, total in (("shape_tokens_total", kept + rounds), ("shape_steps_total", None)):
        values = [value for key, value in found.items() if key.startswith(f"{name} ")]
        assert sum(values) == total if total else 0 < sum(values) < rounds  # three requests at a time
    assert not any(name.startswith("expected_") for name in found)  # no policy
    # The last round of an answer may say more than was asked for.
    assert (kept + rounds) / rounds >= accept_length(answers) > 1.2


def make_counter() -> RoundCounter:
    """With the warning's logger, and no policy."""
    shape, logger = Shape(steps=3, topk=2, width=8), logging.getLogger()
    chooser = ShapeChooser(shape, None)
    return RoundCounter(
        shape, RejectionWatch("TARGET", "HEAD", logger), lambda: chooser, PolicyLog(lambda: chooser, logger)
    )


def read_round(
    counter: RoundCounter,
    kept: list[int],
    nodes: int,
    ended: tuple[int, ...] = (),
    retracted: tuple[int, ...] = (),
    metrics: bool = True,
    drafting: list[int] | None = None,
) -> None:
    """What the scheduler's result processor does with the round of a batch; `ended` and `retracted` are requests."""

    def original(processor: Any, result: Any, batch: Any) -> str:
        result.num_correct_drafts_per_req_cpu = kept
        for request in batch.reqs:
            request.over = True  # what ends with this round has been verified rightly
        return "tokens"

    requests = [SimpleNamespace(over=i in ended, is_retracted=i in retracted) for i in range(len(kept))]
    for request in requests:
        request.finished = lambda request=request: request.over
    reporter = SimpleNamespace(
        current_scheduler_metrics_enabled=metrics,
        metrics_collector=SimpleNamespace(labels={"model_name": "m", "rank": 0}),
    )
    shape = PLAIN if nodes == 1 else Shape(steps=3, topk=2, width=nodes)
    result = RoundResult(
        speculative_num_draft_tokens=nodes, served=ServedRound(shape, len(kept), 10, drafting=drafting)
    )
    processor, batch = SimpleNamespace(metrics_reporter=reporter), SimpleNamespace(reqs=requests)
    assert counter(original, processor, result, batch) == "tokens"


def test_which_rounds_count() -> None:
    """Not those of requests that had ended before (overlap scheduling runs one more); plain ones by shape only."""
    counter = make_counter()

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(f"eagle_plugin:{name}", {"model_name": "m", "rank": "0"} | more)

    read_round(counter, [2, 0, 3, 1], nodes=8, ended=(2,), retracted=(3,))
    assert (value("verify_rounds_total"), value("accepted_tokens_total"), value("drafted_tokens_total")) == (2, 2, 14)
    read_round(counter, [0, 0], nodes=1)
    read_round(counter, [1], nodes=8)
    assert (value("verify_rounds_total"), value("accepted_tokens_total"), value("drafted_tokens_total")) == (3, 3, 21)
    assert value("accept_length_count") == 3
    assert value("shape_rounds_total", shape="3/2/8") == 3 and value("shape_tokens_total", shape="3/2/8") == 6
    assert value("shape_rounds_total", shape="0/1/1") == value("shape_tokens_total", shape="0/1/1") == 2
    forget()


def test_requests_without_drafts_are_in_no_count_of_trees() -> None:
    counter = make_counter()
    read_round(counter, [2, 0, 3, 0], nodes=8, ended=(2,), drafting=[0, 2])

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(f"eagle_plugin:{name}", {"model_name": "m", "rank": "0"} | more)

    assert (value("verify_rounds_total"), value("accepted_tokens_total"), value("drafted_tokens_total")) == (1, 2, 7)
    assert value("shape_rounds_total", shape="3/2/8") == 3 and value("shape_tokens_total", shape="3/2/8") == 5
    forget()


def test_rejected_drafts_are_told_without_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """A server without --enable-metrics has the warning too; rounds that do not count are not counted here either."""
    counter = make_counter()
    for _ in range(REJECTED_ROUNDS):
        read_round(counter, [0], nodes=1, metrics=False)
        read_round(counter, [0], nodes=8, ended=(0,), metrics=False)
    for _ in range(REJECTED_ROUNDS - 1):
        read_round(counter, [0], nodes=8, metrics=False)
    assert not caplog.records
    read_round(counter, [0, 2], nodes=8, ended=(1,), metrics=False)
    read_round(counter, [0], nodes=8, metrics=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "check TARGET HEAD" in caplog.text
    assert REGISTRY.get_sample_value("eagle_plugin:verify_rounds_total", {"model_name": "m", "rank": "0"}) is None
