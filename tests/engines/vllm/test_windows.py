"""A target with a sliding window: trees see the same keys as plain decoding, and freed blocks harm nobody.

The engine with trees measures its costs at the start: the target and the head have caches of different groups.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from head_edits import config
from prometheus_client import REGISTRY
from tiny_checkpoints import read_config
from vllm_engines import AlwaysPlain, chosen_by, engine, generate, random_shapes, rounds, runner
from vllm_greedy import make_prompts, write_heads, write_target

from eagle_plugin.runtime import cost_files
from eagle_plugin.vllm import shapes

PROMPTS = [(prompt * 3)[:120] for prompt in make_prompts(12)]


def exported(name: str) -> dict[str, float]:
    """One of the policy's metrics in this process, by shape."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return {x.labels["shape"]: x.value for x in samples if x.name == f"eagle_plugin:{name}"}


@pytest.mark.parametrize(
    "window", [pytest.param(8, id="narrow", marks=pytest.mark.matrix), pytest.param(40, id="wider than a block")]
)
def test_text_equals_plain_decoding(tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_files, "folder", lambda: tmp_path / "costs")
    target = write_target(tmp_path)
    head = next(iter(write_heads(tmp_path, target).values()))
    with engine(target) as llm:
        everything = generate(llm, PROMPTS, max_tokens=40)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    (target / "config.json").write_text(json.dumps(read_config(target) | mistral))
    with engine(target) as llm:
        plain = generate(llm, PROMPTS, max_tokens=40)
    assert sum(a != b for a, b in zip(plain, everything, strict=True)) > len(PROMPTS) // 2  # the window counts
    with engine(target, head, policy="auto", depth=3, topk=3) as llm:
        served = runner(llm)
        costs = served._shapes.chooser.policy.costs.costs
        with monkeypatch.context() as patch:
            patch.setattr(shapes.round_costs, "measure", None)  # what is kept is not measured again
            served.choose_by_costs()
        assert served._shapes.chooser.policy.costs.costs == costs
        rows = {name: getattr(costs, name).curve.rows for name in ("target", "level", "extend")}
        # 8 requests of 8 nodes, 3 nodes per level and 4 accepted tokens: every size up to these.
        assert {name: found[-1] for name, found in rows.items()} == {"target": 64, "level": 24, "extend": 32}
        assert rows["target"][:4] == (1, 2, 3, 4)
        assert all(min(getattr(costs, name).curve.seconds) > 0 for name in rows)
        assert generate(llm, PROMPTS, max_tokens=40) == plain
        served._reporter.step(has_tokens=False)
        report = served._shapes.chooser.report()
        assert exported("shape_rounds_total") == {str(x): n.rounds for x, n in report.totals.items()} != {}
        assert exported("expected_step_seconds").keys() == {str(x) for x in report.expected} != set()
        assert sum(exported("timed_steps_total").values()) > 0
        before = rounds(llm)
        with random_shapes(llm):
            assert generate(llm, PROMPTS, max_tokens=40) == plain
        count, tokens = rounds(llm, before)
        assert tokens / count > 1.3


def test_a_head_with_the_targets_window(tmp_path: Path) -> None:
    """vLLM gives blocks before the window to other requests while this one runs, so nothing is read into them later:
    neither the first parts of long prompts, nor what was decoded plainly."""
    target = write_target(tmp_path)
    head = write_heads(tmp_path, target)["reduced"]
    config(sliding_window=40, layer_types=["sliding_attention"])(head)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40}
    (target / "config.json").write_text(json.dumps(read_config(target) | mistral))
    prompts = [(prompt * 4)[:150] for prompt in make_prompts(8)]
    few = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24}
    with engine(target, **few) as llm:
        plain = generate(llm, prompts, max_tokens=60)
    with engine(target, head, depth=3, topk=3, **few) as llm:
        served = runner(llm)
        (group,) = served.kv_cache_config.kv_cache_groups  # with the layers of both models
        assert group.kv_cache_spec.block_size < 40 and not served._can_defer
        assert generate(llm, prompts, max_tokens=60) == plain
        with chosen_by(llm, AlwaysPlain(served._caps, None)):
            assert generate(llm, prompts, max_tokens=60) == plain
        assert not len(served._deferred)
