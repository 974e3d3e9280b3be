"""Asks the chooser for a shape when trees are drafted in vLLM, and tells it what the step that verifies them shows.

A round lasts from the drafting of its trees to the drafting of the next ones: the step between them verifies it. What
a step accepted is told when the host knows it, which is in the next step where steps are scheduled ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

from eagle_plugin.core.shape import Shape
from eagle_plugin.policy.chooser import ShapeChooser, SumUp, buffers_of
from eagle_plugin.policy.log import without_policy
from eagle_plugin.policy.path_sums import PathSums
from eagle_plugin.policy.round_times import Clock
from eagle_plugin.policy.served_rounds import ServedRound
from eagle_plugin.policy.shapes import shapes_within
from eagle_plugin.runtime.cost_files import key_of
from eagle_plugin.runtime.device_clock import clock_of
from eagle_plugin.runtime.policy_start import start_policy
from eagle_plugin.runtime.round import Drafts
from eagle_plugin.vllm import captured_costs, round_costs, version
from eagle_plugin.vllm.batch import RoundBatch
from eagle_plugin.vllm.graph_modes import is_compiled
from eagle_plugin.vllm.kernel_settings import cost_settings, kernel_settings
from eagle_plugin.vllm.ranks import gather_objects


class _Step(NamedTuple):
    """A step whose results are not known yet."""

    prompt_tokens: int  # rows of the step after which no token is drawn
    verified: ServedRound | None = None  # the round that it verifies; None where it does not verify a whole one
    places: Sequence[int] = ()  # of that round's requests in the step
    drafting: Sequence[int] | None = None  # places of the requests that have drafts; None: all


class RoundShapes:
    """Leads a `ShapeChooser` through the steps of a worker."""

    def __init__(
        self,
        chooser: ShapeChooser,
        limits: Sequence[int] | None = None,
        captured: Callable[[int], Collection[Shape] | None] = lambda b: None,
    ) -> None:
        """limits: of `draft_limits`. captured: as `CapturedRounds.allowed`, where the chooser has a policy."""
        self.chooser, self._limits, self._captured = chooser, limits, captured
        # Of the chooser's shapes those with at most so many drafts, among those that are captured for a batch size.
        self._within: dict[tuple[int, Collection[Shape] | None], list[Shape]] = {}
        self._prefix_tokens = 0  # of the requests of the step
        self._drafted: ServedRound | None = None  # by the last step that drafted
        self._step: _Step | None = None  # until its results are told
        self._step_before: _Step | None = None  # the same

    def scheduled(
        self, batch: RoundBatch, prefix_tokens: int, prompt_tokens: int, drafting: Sequence[int] | None = None
    ) -> None:
        """Note a step; prefix_tokens: those that its requests have without drafts, a number of the host.

        prompt_tokens: rows of the step after which no token is drawn. drafting: places of the requests that have
        drafts, None: all.
        """
        served, self._drafted = self._drafted, None
        self._prefix_tokens = prefix_tokens
        verified = served if batch.newest else None
        self._step_before, self._step = self._step, _Step(prompt_tokens, verified, batch.newest, drafting)
        if served is None or not len(batch.newest) == batch.b <= served.b:
            self.chooser.pause()  # prompts, cut trees, requests that came: not the time of a round

    def choose(self, batch: RoundBatch, deferred: int = 0, drafting: int | None = None) -> Shape:
        """The shape of the trees to draft for the requests of the step.

        deferred: tokens that the head has not read; drafting: requests that have drafts, None: all.
        """
        drafting = batch.b if drafting is None else drafting
        caps, shapes, allowed = self.chooser.caps, self.chooser.shapes, self._captured(batch.b)
        if self._limits is not None and (most := self._limits[batch.b]) < caps.width - 1:
            if shapes == (caps,):
                return caps.within_drafts(most if drafting else 0)
            key = most, allowed
            if key not in self._within:
                among = shapes if allowed is None else allowed
                self._within[key] = [shape for shape in among if shape.width - 1 <= most]
            allowed = self._within[key]
        return self.chooser.choose(batch.b, self._prefix_tokens, allowed, -(-deferred // batch.b), drafting)

    def end_round(self) -> None:
        """Note that what the head reads now is no part of the round that ends."""
        self.chooser.end_round()

    def begin(self, shape: Shape, batch: RoundBatch) -> None:
        """Note that the next round begins with its drafting."""
        self.chooser.begin(shape, batch.b, self._prefix_tokens)

    def launched(
        self,
        batch: RoundBatch,
        drafts: Drafts,
        whole: bool,
        sum_up: SumUp = PathSums.__call__,
        drafting: Sequence[int] | None = None,
    ) -> None:
        """Note the drafted trees; whole: every request's prompt is read to its end, so that all drafts are verified.

        sum_up and drafting: as for `ShapeChooser.launched`.
        """
        scored = drafts if whole else drafts._replace(scores=None)
        self._drafted = self.chooser.launched(drafts.shape, batch.b, self._prefix_tokens, scored, sum_up, drafting)

    def observe(self, counts: Sequence[int]) -> None:
        """Tell the chooser what the step accepted; counts: tokens of each request, the bonus token included."""
        step, self._step = self._step, None
        self._tell(step, counts)

    def observe_step_before(self, counts: Sequence[int]) -> None:
        """As `observe`, of the step before, if that was not observed yet; counts are in the order of that step."""
        step, self._step_before = self._step_before, None
        self._tell(step, counts)

    def _tell(self, step: _Step | None, counts: Sequence[int]) -> None:
        if step is None:
            return
        self.chooser.observe_tokens(step.prompt_tokens, sum(counts))
        if step.verified is not None:
            places = [i for i in step.places if counts[i]]
            drafted = places if step.drafting is None else [i for i in places if i in step.drafting]
            kept, with_drafts = ([counts[i] - 1 for i in of] for of in (places, drafted))
            self.chooser.observe(step.verified, kept, with_drafts)


def without_costs(caps: Shape, mode: str) -> ShapeChooser:
    """Chooses the caps, or in mode random any shape within them, for as long as no costs are known."""
    return ShapeChooser(caps, None, shapes_within(caps) if mode == "random" else ())


def choose_shapes(runner: Any, caps: Shape, mode: str, logger: logging.Logger) -> ShapeChooser:
    """What chooses the shapes of a `TreeModelRunner`'s rounds; its caches must be there, unused.

    mode: the value of ``EAGLE_POLICY``. Where a round writes as many tokens as a request can have, trees are hardly
    ever drafted: nothing to choose.
    """
    reach = caps.reach + runner.drafter.block_rows
    if mode != "auto" or runner.max_model_len <= reach:
        reason = ""
        if mode == "auto":
            reason = f"--max-model-len is {runner.max_model_len} tokens, of which a round writes {reach}"
        logger.info(without_policy(caps, mode, reason))
        return without_costs(caps, mode)
    graphs = captured_costs.has_graphs(runner)
    costs_of = captured_costs if graphs else round_costs
    config, ranks = runner.vllm_config, get_tensor_model_parallel_world_size()
    key = key_of(
        f"vllm {version.installed()}",
        config.model_config.model,
        config.speculative_config.model,
        runner.device,
        str(runner.dtype),
        caps,
        context=runner.max_model_len,
        cache_tokens=round_costs.slots_in_every_rank(runner),
        requests=runner.max_num_reqs,
        tokens=runner.max_num_tokens,
        compiled=is_compiled(config),
        quantization=config.model_config.quantization,
        kv_cache=config.cache_config.cache_dtype,
        levels=runner.drafter.levels.kind,
        ranks=ranks,
        expert_parallel=config.parallel_config.enable_expert_parallel,
        graphs=runner._step.widest() if graphs else [],
        **kernel_settings(config),
        **cost_settings(config),
    )
    policy = start_policy(
        caps,
        key,
        lambda: costs_of.measure(runner, caps),
        logger,
        runner._step.shapes if graphs else None,
        is_faster_than=lambda costs: costs_of.is_faster_than(runner, caps, costs),
        gather=gather_objects,
        padded=runner.padded_b,
    )
    buffers = buffers_of(policy, runner.max_num_reqs, runner.device)
    path_sums = runner._step.path_sums_by_shape if graphs else None
    clock = clock_of_rounds(runner, ranks)
    return ShapeChooser(caps, policy, clock=clock, buffers=buffers, learns_late=True, path_sums=path_sums)


def clock_of_rounds(runner: Any, ranks: int) -> Clock | None:
    """What times the rounds of a runner with so many ranks; None where times say nothing, or ranks would part."""
    if runner.vllm_config.parallel_config.data_parallel_size > 1:  # engines that share experts
        return None  # a round lasts as long as what the other engines do in it, prompts as well
    # Scheduled ahead, all ranks draft what the step says, and need not choose alike.
    return clock_of(runner.device) if ranks == 1 or runner.use_async_scheduling else None
