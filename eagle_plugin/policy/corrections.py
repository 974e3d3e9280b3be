"""Estimates the speed of the machine and the errors of the cost tables from the times of served rounds.

Of a time nobody knows whether the machine was slow or the shape is: both are estimated together, with how sure they
are, by a Kalman filter (R. E. Kalman, A New Approach to Linear Filtering and Prediction Problems, 1960). It works on
logarithms: measured time = table * speed of the machine * error of the table for this shape * noise.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_plugin.core.shape import Shape

# Standard deviations of logarithms.
TABLE_ERROR = 0.1  # of a shape's table against those of other shapes, before anything is known
NOISE = 0.1  # of the time of one round, at first
DRIFT = 0.03  # of what the speed of the machine changes by from round to round, at first
NEW_SPEED = 1.0  # of the speed where batches have another size: tables can be wrong about sizes too
LARGEST_SURPRISE = math.log(2)  # a round that takes longer than twice its prediction counts as twice
OUTLIER = 2.5  # standard deviations: what is further off was disturbed, and tells less the further off it is
LASTING = 2  # rounds in a row that are so far off: those after them were not disturbed
FORGETTING = 0.999  # per round: what was learned of a table's error fades
# Machines differ: the variances of noise and drift have a common factor, which goes to where the errors of predictions
# are as large as the filter takes them to be, by so much per round, between these bounds.
SCALE_RATE = 0.03
SCALES = 0.02, 25.0


class Corrections:
    """The speed of the machine, and by size class of the batch the errors of the tables by shape."""

    def __init__(self) -> None:
        self.speed = 0.0  # log of measured over predicted seconds, of all shapes
        self._sizes: dict[int, _ShapeErrors] = {}
        self._last: tuple[int, Shape] | None = None  # size class and shape of the last round
        self._scale = 1.0  # of the variances of noise and drift
        self._rounds = 0

    def observe(self, size: int, shape: Shape, ratio: float) -> None:
        """Learn from one round; ratio: log of its time over what the tables say."""
        self._rounds += 1
        errors = self._sizes.setdefault(size, _ShapeErrors())
        if self._last is None or size != self._last[0]:
            errors.forget_speed()
        change, surprise = errors.observe(shape, ratio - self.speed, self._rounds, self._scale)
        self.speed += change
        if self._last == (size, shape):  # what another shape surprises by is the tables' error too
            scale = self._scale * math.exp(SCALE_RATE * (min(surprise**2, OUTLIER**2) - 1))
            self._scale = max(SCALES[0], min(scale, SCALES[1]))
        self._last = size, shape

    def errors(self, size: int) -> dict[Shape, float]:
        """Logs of true over tabled seconds by shape, without the speed; of shapes that were served in such batches."""
        errors = self._sizes.get(size)
        return errors.at(self._rounds) if errors is not None else {}

    def error(self, size: int, shape: Shape) -> float:
        """As `errors`, of one shape; 0 where it was not served."""
        errors = self._sizes.get(size)
        return errors.of(shape, self._rounds) if errors is not None else 0.0

    def doubt(self, size: int, shape: Shape, other: Shape) -> float:
        """The standard deviation of the difference of two shapes' errors, given all rounds."""
        errors = self._sizes.get(size) or _ShapeErrors()
        return math.sqrt(max(0.0, errors.difference(shape, other, self._rounds)))


class _ShapeErrors:
    """Means and covariances for batches of one size class; the first row and column are the speed's."""

    def __init__(self) -> None:
        self._shapes: dict[Shape, int] = {}  # its row
        # Rounds in a row that were far off, longer ones or shorter ones (negative); whether another shape's was not.
        self._far: dict[Shape, tuple[int, bool]] = {}
        self._means = np.zeros(1)  # by row; that of the speed is kept by the caller, this one stays 0
        self._set_covariances(np.zeros((1, 1)))
        self._learned = 0  # the round of the last time

    def _set_covariances(self, values: np.ndarray) -> None:
        """Keep them with the views that every round writes: it runs on the host between two rounds."""
        self._covariances = values
        self._diagonal = values.reshape(-1)[:: len(values) + 1]

    def forget_speed(self) -> None:
        self._covariances[0] = self._covariances[:, 0] = 0.0
        self._covariances[0, 0] = NEW_SPEED**2

    def observe(self, shape: Shape, ratio: float, now: int, scale: float) -> tuple[float, float]:
        """Learn from the round of this number; what the speed changes by, and the error in standard deviations.

        ratio: log of its time over what the tables say at the speed that was expected. scale: of noise and drift.
        """
        row = self._row(shape)
        self._age(now, scale * DRIFT**2)
        shared = self._covariances[0] + self._covariances[row]  # of everything with what was measured
        variance = float(shared[0] + shared[row]) + scale * NOISE**2
        surprise = max(-LARGEST_SURPRISE, min(ratio - float(self._means[row]), LARGEST_SURPRISE))
        deviations = surprise / math.sqrt(variance)
        if not self._is_lasting(shape, deviations):
            variance *= max(1.0, deviations**2 / OUTLIER**2)
        gains = shared / variance
        self._covariances -= shared[:, None] * gains
        change = surprise * float(gains[0])
        gains *= surprise
        gains[0] = 0.0
        self._means += gains
        return change, deviations

    def _is_lasting(self, shape: Shape, deviations: float) -> bool:
        """Whether this shape's last rounds were all far off, to the same side, and another shape's was not meanwhile.

        Then neither a disturbance nor the speed of the machine explains them.
        """
        if abs(deviations) <= OUTLIER:
            self._far.pop(shape, None)
            self._far = {other: (rounds, True) for other, (rounds, _) in self._far.items()}
            return False
        side = 1 if deviations > 0 else -1
        rounds, is_alone = self._far.get(shape, (0, False))
        rounds, is_alone = (rounds + side, is_alone) if rounds * side > 0 else (side, False)
        self._far[shape] = rounds, is_alone
        return is_alone and abs(rounds) > LASTING

    def at(self, now: int) -> dict[Shape, float]:
        return {shape: self.of(shape, now) for shape in self._shapes}

    def of(self, shape: Shape, now: int) -> float:
        row = self._shapes.get(shape)
        return 0.0 if row is None else FORGETTING ** (now - self._learned) * float(self._means[row])

    def difference(self, shape: Shape, other: Shape, now: int) -> float:
        """The variance of the difference of two errors."""
        faded = FORGETTING ** (2 * (now - self._learned))
        rows = [self._shapes[x] for x in (shape, other) if x in self._shapes]
        known = sum(self._covariances[row, row] for row in rows) + (2 - len(rows)) * TABLE_ERROR**2
        if len(rows) == 2:
            known -= 2 * self._covariances[rows[0], rows[1]]
        return float(faded * known + (1 - faded) * 2 * TABLE_ERROR**2)

    def _row(self, shape: Shape) -> int:
        row = self._shapes.get(shape)
        if row is None:
            row = self._shapes[shape] = len(self._means)
            self._means = np.append(self._means, 0.0)
            self._set_covariances(np.pad(self._covariances, (0, 1)))
            self._covariances[row, row] = TABLE_ERROR**2
        return row

    def _age(self, now: int, drift: float) -> None:
        """What is known of the errors fades towards what was known at first, that of the speed without a bound.

        drift: the variance of what the speed changed by.
        """
        kept = FORGETTING ** (now - self._learned)
        self._learned = now
        of_speed = float(self._covariances[0, 0])
        # All rows and columns fade but those of the speed: its covariances with the others fade once, not twice.
        # Nothing is divided by `kept`: after some 700,000 rounds of batches of other sizes it is 0.
        with_speed = self._covariances[0] * kept
        self._means *= kept
        self._covariances *= kept**2
        self._covariances[0] = self._covariances[:, 0] = with_speed
        self._diagonal += (1 - kept**2) * TABLE_ERROR**2
        self._covariances[0, 0] = of_speed + drift
