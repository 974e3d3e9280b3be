"""What forwards read whose times are the costs of a round, and what vLLM runs them by; without an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_signatures import calls
from key_world import CONTEXT, ROOM, KeyWorld
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

from eagle_plugin.core.shape import Levels, Shape
from eagle_plugin.runtime.parallel_levels import HeadLevels
from eagle_plugin.runtime.round import HeadState, TopM
from eagle_plugin.vllm import captured_costs, kernel_settings, round_costs, shapes
from eagle_plugin.vllm.captured_costs import CapturedRounds
from eagle_plugin.vllm.engine_graphs import graph_of_v1, graph_of_v2
from eagle_plugin.vllm.round_costs import RoundTimer

CAPS, VOCABULARY, HIDDEN = Shape(3, 2, 8), 300, 4


class Head:
    """Notes what it reads."""

    block_rows, levels, hidden_size, dtype = 0, HeadLevels(), HIDDEN, torch.float32
    _draft_attn_layer_names = frozenset({"head"})

    def __init__(self) -> None:
        self.tokens, self.states = list[torch.Tensor](), list[torch.Tensor]()

    def _note(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        self.tokens.append(tokens.flatten())
        self.states.append(states)

    def extend(self, batch: Any, features: torch.Tensor, *_: Any) -> None:
        self._note(batch.tokens, features)

    def read_deferred(self, deferred: Any) -> None:
        self._note(deferred.tokens, deferred.features)

    def draft_tree(self, batch: Any, roots: torch.Tensor, state: HeadState) -> None:
        self._note(roots, state.hidden)


class Runner:
    """As much of a `TreeModelRunner` as a measurement needs; the engine pads to eights and has graphs for 64 rows."""

    device = torch.device("cpu")
    max_num_reqs, max_num_tokens, max_model_len = 8, 64, 256
    lora_config = None
    supports_mm_inputs = use_aux_hidden_state_outputs = enable_prompt_embeds = uses_inputs_embeds = False
    linear = SimpleNamespace(names=frozenset())
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY, uses_mrope=False)

    def __init__(self, engine_graph: Callable[..., Any] = graph_of_v1) -> None:
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["target", "head"])
        self.kv_cache_config = SimpleNamespace(num_blocks=400, kv_cache_groups=[group])
        self.compilation_config = SimpleNamespace(static_forward_context={}, fast_moe_cold_start=False)
        parallel = SimpleNamespace(data_parallel_size=1, use_sequence_parallel_moe=False, is_moe_model=None)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, compilation_config=self.compilation_config)
        self._engine_graph, self.drafter = engine_graph, Head()
        self._rows = torch.full((128,), 7, dtype=torch.int32), torch.full((128,), 7)
        padding = torch.zeros(128, dtype=torch.bool)
        self.input_buffers, self.cudagraph_manager = SimpleNamespace(is_padding=padding), self
        self.forwards, self.contexts = list[torch.Tensor](), list[Any]()

    def engine_graph(self, b: int, rows: int) -> Any:
        return self._engine_graph(self, b, rows)

    def maybe_select_dummy_loras(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def query_rows(self) -> Any:
        return self._rows

    def rotary_rows(self) -> torch.Tensor:
        return self._rows[1]

    def _mode(self, n: int) -> tuple[CUDAGraphMode, int]:
        return (CUDAGraphMode.PIECEWISE, -(-n // 8) * 8) if n <= 64 else (CUDAGraphMode.NONE, n)

    def _determine_batch_execution_and_padding(self, num_tokens: int, num_reqs: int, **_: Any) -> Any:
        mode, padded = self._mode(num_tokens)
        return mode, BatchDescriptor(padded), False, None, None

    def _prepare_padding_mask(self, n: int, padded: int) -> torch.Tensor:
        return torch.arange(padded) >= n

    def dispatch(self, b: int, n: int, *_: Any) -> Any:
        mode, padded = self._mode(n)
        return SimpleNamespace(cg_mode=mode, num_tokens=padded)

    def _model_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        self.contexts.append(context)
        n = int((~context.is_padding).sum()) if context.is_padding is not None else len(input_ids)
        self.forwards.append(input_ids[:n].clone())
        return torch.zeros(len(input_ids), HIDDEN)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (round_costs, captured_costs):
        monkeypatch.setattr(module, "in_any_rank", bool)
        monkeypatch.setattr(module, "accept", lambda *_, **__: None)
    monkeypatch.setattr(round_costs, "ranks_in_step", lambda: 1)


def differ(rows: torch.Tensor) -> bool:
    return len(torch.unique(rows, dim=0)) == len(rows)


def test_rows_of_different_requests_differ() -> None:
    """Else a layer of experts would send all of them to the same experts."""
    runner = Runner()
    round_costs.measure(runner, CAPS, budget=math.inf)
    head = runner.drafter
    assert max(map(len, runner.forwards)) == 64 and len(head.tokens) > 50
    for tokens in (*runner.forwards, *head.tokens):
        assert differ(tokens) and tokens.min() >= 0 and tokens.max() < VOCABULARY
    assert all(differ(states) for states in head.states)
    again = Runner()
    RoundTimer(again, CAPS).target(8, 8, 16)
    assert any(torch.equal(again.forwards[0], tokens) for tokens in runner.forwards)  # as another rank draws them


@pytest.mark.parametrize("engine_graph", [graph_of_v1, graph_of_v2])
def test_a_forward_runs_by_what_the_engine_has_for_it(engine_graph: Callable[..., Any]) -> None:
    """Its own graphs read its own memory, and are of padded rows."""
    runner = Runner(engine_graph)
    timer = RoundTimer(runner, CAPS)
    timer.target(3, 5, 16)
    (padded,) = runner.contexts
    assert padded.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE and padded.batch_descriptor.num_tokens == 16
    assert padded.is_padding.tolist() == [False] * 15 + [True]
    timer.target(8, 9, 16)
    eager = runner.contexts[-1]
    assert eager.cudagraph_runtime_mode == CUDAGraphMode.NONE and eager.batch_descriptor.num_tokens == 72
    ids, positions = runner.query_rows()
    assert torch.equal(ids[:72], runner.forwards[1]) and positions[:10].tolist() == [*range(16, 25), 16]
    assert len(timer._features) == 72
    timer.target(3, 5, 16)
    assert ids[15] == positions[15] == 0 and len(timer._features) == 15


class Step:
    """The captured functions of a step."""

    _head_layer = "head"

    def __init__(self, runner: Runner, has_plain: bool) -> None:
        self._runner, self._has_plain = runner, has_plain
        root = SimpleNamespace(lengths=None, tokens=torch.arange(8), state=HeadState(TopM(None, None), torch.eye(8)))  # type: ignore[arg-type]
        self._memory = SimpleNamespace(features=lambda b, width: torch.zeros(b * width, HIDDEN), root=lambda *_: root)
        self.accepted = list[torch.Tensor]()

    def has_plain(self, b: int) -> bool:
        return self._has_plain

    def can_verify(self) -> bool:
        return True

    def begin(self, batch: Any, *_: Any, **__: Any) -> None:
        self._n = batch.b * batch.width

    def verify(self) -> torch.Tensor:
        self._runner.forwards.append(self._runner.query_rows()[0][: self._n].clone())
        return torch.zeros(self._n, HIDDEN)

    def walk(self, *_: Any) -> None:
        pass

    def extend(self, accepted: Any, features: list[torch.Tensor], is_greedy: bool) -> None:
        self.accepted.append(accepted.tokens.flatten())
        self._runner.drafter.states.append(features[0])

    def draft_tree(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("has_plain", [True, False])
def test_rows_of_captured_rounds_differ_too(has_plain: bool) -> None:
    """Plain rounds for which nothing was captured run by the engine's graphs."""
    runner: Any = Runner()
    step = runner._step = Step(runner, has_plain)
    rounds = CapturedRounds(runner, CAPS)
    rounds.phases(CAPS, 4, 16)
    rounds.plain(4, 16)
    assert [len(tokens) for tokens in runner.forwards] == [4 * CAPS.width, 4]
    assert all(differ(tokens) for tokens in (*runner.forwards, *step.accepted))
    assert len(step.accepted[0]) == 4 * CAPS.max_accept_length and differ(runner.drafter.states[0])
    modes = [context.cudagraph_runtime_mode for context in runner.contexts]
    assert modes == ([] if has_plain else [CUDAGraphMode.PIECEWISE])


class FormulaTimer(RoundTimer):
    """Its forwards take what a formula says."""

    def __init__(self, world: KeyWorld) -> None:
        self.most_requests, self.most_rows, self._slots, self._reach = 64, 1024, ROOM, CAPS.reach
        self.longest, self.short = CONTEXT, 16
        self.target, self.extend = world.target, world.head  # type: ignore[method-assign]
        self.level = world.head  # type: ignore[method-assign]

    def prompt_token(self) -> float:
        return 1.0


@pytest.mark.parametrize("share", [0.006, 0.03])
def test_costs_with_half_a_million_tokens(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        world = KeyWorld(share, seed)
        monkeypatch.setattr(round_costs, "RoundTimer", lambda *_: FormulaTimer(world))  # noqa: B023
        drafter = SimpleNamespace(levels=SimpleNamespace(kind=Levels.RECURRENT))
        costs = round_costs.measure(SimpleNamespace(drafter=drafter), CAPS, budget=math.inf)
        assert abs(world.error(costs._replace(draft=0.0005), CAPS)) < 0.05


def config(**changes: Any) -> Any:
    given = {"custom": False, "all2all": "naive", "passes": "a", "head": None} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(disable_custom_all_reduce=given["custom"], all2all_backend=given["all2all"]),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(compute_hash=lambda: given["passes"])),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(quantization=given["head"])),
    )


def test_costs_belong_to_what_changes_the_speed_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kernel_settings.cost_settings
    keys = [settings(config())]
    keys += [settings(config(**x)) for x in ({"custom": True}, {"all2all": "b"}, {"passes": "b"}, {"head": "fp8"})]
    for name in kernel_settings.ALL_REDUCE:
        monkeypatch.setenv(name, "1")
        keys.append(settings(config()))
    assert settings(config()) == keys[-1] and len({str(key) for key in keys}) == len(keys)
    assert calls(shapes.choose_shapes, "cost_settings") == ["cost_settings(config)"]


def test_costs_belong_to_the_size_of_the_cache() -> None:
    """In tokens: of blocks of the smallest group."""
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (32, 16)]
    served = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=10, kv_cache_groups=groups),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)),
    )
    assert round_costs.slots_in_every_rank(served) == 160
    (key,) = calls(shapes.choose_shapes, "key_of")
    assert "context=runner.max_model_len" in key and "cache_tokens=round_costs.slots_in_every_rank(runner)" in key
