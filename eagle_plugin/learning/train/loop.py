"""The training loop: updates until the budget is spent, with evaluation, checkpoints and logs."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eagle_plugin.common.url_credentials import without_credentials_in
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.train.batches import Batch
from eagle_plugin.learning.train.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RunState,
    check_not_lost,
    check_same_run,
    load_newest,
)
from eagle_plugin.learning.train.distributed import Ranks, hold_gradients
from eagle_plugin.learning.train.document_order import Position
from eagle_plugin.learning.train.feed import Feed, PlannedUpdate
from eagle_plugin.learning.train.logs import DEPTH_COLUMNS, Logs
from eagle_plugin.learning.train.model import Parameters, objective_settings
from eagle_plugin.learning.train.objectives import METRICS, Objective, summarize
from eagle_plugin.learning.train.progress import Bar
from eagle_plugin.learning.train.recipe import TrainError, TrainRecipe
from eagle_plugin.learning.train.schedule import phase_at
from eagle_plugin.learning.train.sources import Source, digest_items


@dataclass(frozen=True)
class RunResult:
    """What a run reached."""

    position: Position
    epochs: float
    seconds: float
    finished: bool  # False: stopped by a signal
    held_out: dict[str, list[float]]  # by metric and depth; empty without evaluation


class LogWindow:
    """Sums over the updates since the last row of the training log."""

    def __init__(self, steps: int, start: Position, device: torch.device) -> None:
        self.sums = torch.zeros(steps, len(METRICS), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), dtype=torch.float64, device=device)
        self.updates = 0
        self.start, self.clock = start, time.perf_counter()
        self.last: PlannedUpdate | None = None


class Trainer:
    """A run in a folder: OUT/checkpoints, OUT/logs. Every process of the run makes one."""

    def __init__(
        self, settings: TrainRecipe, out: Path, ranks: Ranks, source: Source, objective: Objective, bar: Bar
    ) -> None:
        self.settings, self.out, self.ranks, self.objective, self.bar = settings, out, ranks, objective, bar
        self.feed = Feed(settings, source, ranks, objective.head.mask_token_id)
        self.module: nn.Module = ranks.wrap(objective)
        in_buckets = isinstance(self.module, DistributedDataParallel)
        self.parameters = Parameters(objective, settings, in_buckets)
        # A CPU computes meanwhile, and would need memory for the copy.
        self.checkpoints = CheckpointWriter(out / "checkpoints", background=ranks.device.type != "cpu")
        self.position = Position()
        self._documents = digest_items(source.items)
        self._recipe = without_credentials_in(settings.model_dump(mode="json", by_alias=True))
        self._held_out: dict[str, list[float]] = {}
        self._spent, self._clock = 0.0, time.perf_counter()
        self._told = self._stop = False  # this process got a signal; all processes have agreed to stop
        self.feed.gives_up = lambda: self._told and ranks.world == 1  # several agree in an update

    def resume(self) -> bool:
        """Continue from the newest checkpoint in the folder that is not damaged; False if the run is a new one.

        Raises:
            TrainError: it is of another recipe or of other documents, all are damaged, or they are gone.
        """
        found = load_newest(self.out / "checkpoints")
        if found is None:
            check_not_lost(self.out)
        else:
            check_same_run(found.state, self._recipe, self._documents, self.out)
            self.parameters.restore(found.parameters, found.optimiser)
            self.position, self._spent = found.state.position, found.state.seconds
            for problem in found.damaged:
                self.bar.print(f"warning: {problem}; an older checkpoint is used")
        update = self.position.update
        if int(self.ranks.add_up(torch.tensor(update, device=self.ranks.device))) != update * self.ranks.world:
            raise TrainError(
                f"the processes found different checkpoints in {self.out}, this one that of update {update:,}; "
                "give all machines the same --out"
            )
        return found is not None

    def run(self) -> RunResult:
        """Train until the budget is spent, or until SIGINT or SIGTERM; the last update is always in a checkpoint.

        Raises:
            TrainError: the loss or the head is no longer finite, or the disk is full.
        """
        settings, first = self.settings, self.position
        self._clock = time.perf_counter() - self._spent
        self.feed.seconds = self._spent
        logs = Logs(self.out / "logs", settings.depths, first.update) if self.ranks.writes else None
        saved = first.update if first.update else -1
        evaluated = first.update
        window: LogWindow | None = None
        phase = -1
        try:
            if self.feed.evaluates and not first.update:
                self._log_val(logs)
            with self._signals(), self.checkpoints, self.feed.open(first) as steps:
                for step, batches in steps:
                    if step.phase != phase:
                        self._log_train(window, logs)
                        phase, window = step.phase, None
                        self._set_phase(phase)
                    if window is None:
                        window = LogWindow(settings.phases[phase].steps, step.before, self.ranks.device)
                    self._update(step, batches, window)
                    self.checkpoints.wait(only_if_done=True)
                    self.position = step.after
                    self.bar.advance(self.feed.progress(self.position))
                    update = self.position.update
                    if update % settings.log_every == 0:
                        self._log_train(window, logs)
                        window = None
                    if self._stop:
                        break
                    pause = time.perf_counter()
                    if self.feed.evaluates and update % settings.eval_every == 0:
                        self._log_val(logs)
                        evaluated = update
                    if update % settings.checkpoint_every == 0:
                        self._save()
                        saved = update
                    if window is not None:
                        window.clock += time.perf_counter() - pause
                self._stop |= self.feed.gave_up
                self._log_train(window, logs)
                if saved != self.position.update:
                    self._save()
                # Also when a finished run is started again only to export its head.
                if self.feed.evaluates and not self._stop and (evaluated != self.position.update or not self._held_out):
                    self._log_val(logs)
                self.checkpoints.wait()
                self.ranks.wait()
        except DataError:
            if self.ranks.world == 1 and self.position.update > max(saved, 0):  # what was learnt until then is kept
                with self.checkpoints:
                    self._save()
            raise
        finally:
            if logs is not None:
                logs.close()
        epochs = self.feed.order.epochs(self.position)
        return RunResult(self.position, epochs, self._seconds(), not self._stop, self._held_out)

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Metrics on the held-out documents by depth, at the most steps of any phase."""
        objective, depths = self.objective, self.settings.depths
        training = objective.settings
        whole = objective_settings(self.settings, depths, self.objective.method)
        objective.settings = replace(whole, keep_rate=1.0, keep_floor=1.0, anchors=0)
        objective.eval()
        sums = torch.zeros(depths, len(METRICS), dtype=torch.float64, device=self.ranks.device)
        for batch in self.feed.held_out():
            plan = objective.plan(batch, seed=0)
            sums += self.module(batch, plan, torch.ones_like(plan.totals)).sums
        objective.settings = training
        return summarize(self.ranks.add_up(sums))

    def _update(self, step: PlannedUpdate, batches: Sequence[Batch], window: LogWindow) -> None:
        """Forward, backward and one step of the optimisers."""
        objective, ranks = self.objective, self.ranks
        objective.train()  # before the plan: only training has noise
        place = (self.settings.seed, step.before.update, ranks.rank)
        plans = [objective.plan(batch, mix_seed(*place, i)) for i, batch in enumerate(batches)]
        totals = torch.stack([plan.totals for plan in plans]).sum(0).to(ranks.device)
        # One exchange for everything that the processes must agree on: the weights, a signal, and the time of rank 0.
        told = torch.tensor([float(self._told), 0.0 if ranks.rank else self._seconds()], dtype=torch.float64)
        agreed = ranks.add_up(torch.cat([totals, told.to(ranks.device)]))
        totals = agreed[:-2]
        for i, (batch, plan) in enumerate(zip(batches, plans, strict=True)):
            with hold_gradients(self.module, last=i == len(batches) - 1):
                losses = self.module(batch, plan, totals)
                # DDP and FSDP average the gradients over the processes; the loss is a sum.
                (losses.loss * ranks.world).backward()
            window.sums += losses.sums
            window.loss += losses.loss.detach()
        window.norm += self.parameters.step(step.factor)
        window.updates += 1
        window.last = step
        self._stop, self.feed.seconds = bool(agreed[-2] > 0), float(agreed[-1])

    def _set_phase(self, phase: int) -> None:
        steps = self.settings.phases[phase].steps
        self.objective.settings = objective_settings(self.settings, steps, self.objective.method)
        self.bar.show(f"phase {phase + 1}/{len(self.settings.phases)}")

    def _log_train(self, window: LogWindow | None, logs: Logs | None) -> None:
        if window is None or window.last is None:
            return
        step = window.last
        metrics = summarize(self.ranks.add_up(window.sums))
        loss = float(self.ranks.add_up(window.loss)) / window.updates
        norm = float(window.norm) / window.updates
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainError(
                f"the loss is {loss:g} and the gradient's norm {norm:g} at update {step.after.update}; "
                "lower optimiser.lr or raise optimiser.warm_up, and train in another folder (--out)"
            )
        rate = (step.after.tokens - window.start.tokens) / (time.perf_counter() - window.clock)
        lr = self.settings.optimiser.lr * step.factor
        row = self._row(step.after, step.phase, metrics)
        if logs is not None:
            logs.write("train", row | {"loss": loss, "lr": lr, "gradient_norm": norm, "tokens_per_s": rate})
        self.bar.report(loss, metrics["acceptance"], rate)

    def _log_val(self, logs: Logs | None) -> None:
        metrics = self._held_out = self.evaluate()
        phase = phase_at(self.settings.phases, self.feed.progress(self.position))
        row = self._row(self.position, phase, metrics)
        row["loss"] = self.objective.total_loss(metrics)
        if logs is not None:
            logs.write("val", row)
        self.bar.report_held_out(self.position.update, row["loss"], metrics["acceptance"])

    def _row(self, position: Position, phase: int, metrics: dict[str, list[float]]) -> dict[str, Any]:
        row: dict[str, Any] = {
            "update": position.update,
            "epoch": self.feed.order.epochs(position),
            "tokens": position.tokens,
            "seconds": self._seconds(),
            "phase": phase + 1,
        }
        for name in DEPTH_COLUMNS:
            row |= {f"{name}_{k}": value for k, value in enumerate(metrics[name], 1)}
        return row

    def _save(self) -> None:
        if wrong := self.parameters.not_finite():
            raise TrainError(
                f"{wrong[0]} has values that are not finite at update {self.position.update}; "
                "lower optimiser.lr or raise optimiser.warm_up, and train in another folder (--out)"
            )
        self.checkpoints.wait()  # not two copies in memory
        parameters, optimiser = self.parameters.gather(self.ranks.writes, self.checkpoints.background)
        if self.ranks.writes:
            state = RunState(self.position, self._seconds(), self._recipe, self._documents)
            self.checkpoints.save(Checkpoint(state, parameters, optimiser))
        self.ranks.wait()

    def _seconds(self) -> float:
        return time.perf_counter() - self._clock

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the next update; a second signal ends it immediately."""

        def stop(number: int, frame: Any) -> None:
            # The terminal sends the signal to every process, and torchrun sends it again.
            if self._told and self.ranks.world == 1:
                raise KeyboardInterrupt
            self._told = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def mix_seed(*numbers: int) -> int:
    """One seed of several numbers, different for each choice of them."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
