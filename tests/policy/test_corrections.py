"""The speed of the machine and the errors of the tables, against the whole posterior of a small Gaussian model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_plugin.core.shape import PLAIN, Shape
from eagle_plugin.policy import corrections as module
from eagle_plugin.policy.corrections import DRIFT, FORGETTING, NEW_SPEED, NOISE, TABLE_ERROR, Corrections

SHAPES = (PLAIN, Shape(1, 3, 4), Shape(2, 4, 8), Shape.chain(3))
SERVED = [(0, 0)] * 4 + [(0, 2)] * 3 + [(3, 1)] * 2 + [(0, 2)] * 2 + [(0, 0), (3, 0), (3, 1), (0, 3), (0, 2)]


def posterior(served: list[tuple[int, int]], ratios: np.ndarray) -> tuple[float, list[float]]:
    """The last speed and the errors of the last size, by shape: means given all rounds, in one solution.

    served: size class and index of the shape, by round. Columns of the prior are independent causes: a first speed per
    run of one size, a drift per round, and per size and shape a first error and what is added to it per round.
    """
    rounds, sizes = len(served), sorted({size for size, _ in served})
    starts = [t for t in range(rounds) if t == 0 or served[t][0] != served[t - 1][0]]
    last_start = {t: max(x for x in starts if x <= t) for t in range(rounds)}
    variances: list[float] = []
    speed, error = np.zeros((rounds, 0)), {(size, i): np.zeros((rounds, 0)) for size in sizes for i in range(4)}

    def add(variance: float, rows: np.ndarray, to: tuple[int, int] | None) -> None:
        nonlocal speed
        variances.append(variance)
        zero = np.zeros((rounds, 1))
        speed = np.hstack([speed, rows[:, None] if to is None else zero])
        for key in error:
            error[key] = np.hstack([error[key], rows[:, None] if to == key else zero])

    after = np.arange(rounds)
    for start in starts:
        add(NEW_SPEED**2, np.array([float(last_start[t] == start) for t in range(rounds)]), None)
    for t in range(rounds):
        add(
            DRIFT**2,
            np.array([float(last_start[t] <= t <= now and last_start[now] == last_start[t]) for now in after]),
            None,
        )
    for key in error:
        add(TABLE_ERROR**2, FORGETTING ** (after + 1.0), key)
        for t in range(rounds):
            faded = np.where(after >= t, FORGETTING ** (after - t).astype(float), 0.0)
            add((1 - FORGETTING**2) * TABLE_ERROR**2, faded, key)
    prior = np.diag(variances)
    seen = np.stack([speed[t] + error[size, i][t] for t, (size, i) in enumerate(served)])
    covariance = seen @ prior @ seen.T + NOISE**2 * np.eye(rounds)
    causes = prior @ seen.T @ np.linalg.solve(covariance, ratios)
    return float(speed[-1] @ causes), [float(error[served[-1][0], i][-1] @ causes) for i in range(4)]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_posterior_of_the_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the speed of one size class says nothing of the next one's; a wrong drift is the control."""
    gen = np.random.default_rng(seed)
    ratios = gen.normal(0.0, 0.05, len(SERVED))  # without outliers
    monkeypatch.setattr(module, "SCALE_RATE", 0.0)
    speed, errors = posterior(SERVED, ratios)

    def found() -> tuple[float, list[float]]:
        filtered = Corrections()
        size = SERVED[0][0]
        for (next_size, i), ratio in zip(SERVED, ratios, strict=True):
            if next_size != size:  # the model of this test begins each run of one size with a speed of 0
                filtered.speed, size = 0.0, next_size
            filtered.observe(size, SHAPES[i], float(ratio))
        by_shape = filtered.errors(size)
        return filtered.speed, [by_shape.get(shape, 0.0) for shape in SHAPES]

    assert found() == (pytest.approx(speed, abs=1e-9), pytest.approx(errors, abs=1e-9))
    monkeypatch.setattr(module, "DRIFT", 0.05)
    assert found()[1] != pytest.approx(errors, abs=1e-4)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.01, 0.02, 0.05), (0.1, 0.5, 2.0), (0.4, 8.0, 25.0)])
def test_how_much_the_times_of_a_machine_scatter_is_learned(noise: float, least: float, most: float) -> None:
    """On a quiet one a change tells at once that a table is wrong; on a noisy one it tells next to nothing."""
    gen = np.random.default_rng(3)
    filtered = Corrections()
    for i, true, rounds in ((0, 0.0, 400), (2, 0.15, 6)):
        for _ in range(rounds):
            filtered.observe(0, SHAPES[i], true + float(gen.normal(0, noise)))
    assert least <= filtered._scale <= most
    found = filtered.errors(0)[SHAPES[2]] - filtered.errors(0)[SHAPES[0]]
    assert (found > 0.12) == (noise == 0.01) and (abs(found) < 0.06) == (noise == 0.4)


def test_covariances_stay_symmetric_and_positive() -> None:
    gen = np.random.default_rng(1)
    filtered = Corrections()
    for _ in range(5000):
        filtered.observe(int(gen.integers(2)), SHAPES[gen.integers(4)], float(gen.normal(0, 2.0)))
    for errors in filtered._sizes.values():
        covariances = errors._covariances
        np.testing.assert_allclose(covariances, covariances.T, atol=1e-9)
        assert np.linalg.eigvalsh(covariances).min() > 0
    assert all(math.isfinite(error) for error in filtered.errors(0).values())


def test_what_is_known_well_is_not_moved_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a hundred changes, a machine that slows down at the next one is no shape's error."""
    monkeypatch.setattr(module, "SCALE_RATE", 0.0)
    filtered = Corrections()

    def serve(i: int, ratio: float, rounds: int = 10) -> None:
        for _ in range(rounds):
            filtered.observe(0, SHAPES[i], ratio)

    serve(0, 0.0)
    serve(2, 0.3)
    first = filtered.errors(0)
    assert first[SHAPES[2]] - first[SHAPES[0]] > 0.15  # the control: nothing is known yet
    filtered = Corrections()
    for turn in range(100):
        serve(2 * (turn % 2), 0.0)
    serve(0, 0.0)
    serve(2, 0.3)
    later = filtered.errors(0)
    assert abs(later[SHAPES[2]] - later[SHAPES[0]]) < 0.08


@pytest.mark.filterwarnings("error")
def test_what_was_learned_long_ago_is_forgotten() -> None:
    """After a million rounds of other batches, of which nothing is left of 0.999 per round: as if it began anew."""
    filtered, anew = Corrections(), Corrections()
    for size, shape, ratio in ((0, 2, 0.3), (5, 0, 0.0)):
        for _ in range(9):
            filtered.observe(size, SHAPES[shape], ratio)
    filtered._rounds += 1_000_000
    assert filtered.errors(0)[SHAPES[2]] == 0.0
    assert filtered.doubt(0, SHAPES[2], PLAIN) == pytest.approx(math.sqrt(2) * TABLE_ERROR)
    filtered._scale = anew._scale
    filtered.speed = anew.speed
    for shape in (2, 0, 2):
        filtered.observe(0, SHAPES[shape], 0.1 * shape)
        anew.observe(0, SHAPES[shape], 0.1 * shape)
        assert filtered.speed == pytest.approx(anew.speed, abs=1e-9)
        assert filtered.errors(0) == pytest.approx(anew.errors(0), abs=1e-9)
