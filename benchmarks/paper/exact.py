"""Data in; exact evidence and posterior moments of the paper's three models out, in NumPy.

Pumps: the rates integrate out in closed form, which leaves a quadrature over two parameters.
Regression: a quadrature over three weights. Factorial HMM: the forward algorithm over all 2^D
states, and the optimal proposal p(x_t | x_{t−1}, y_t), drawn by dynamic programming over sums.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp

Floats = NDArray[np.float64]


class Answer(NamedTuple):
    """Log evidence, and means and standard deviations of the parameters."""

    log_evidence: float
    mean: Floats
    sd: Floats


def _moments(log_density: Floats, points: Floats) -> Answer:
    """Of a density at points, each of which stands for the same volume included in it."""
    total = logsumexp(log_density)
    weight = np.exp(log_density - total)
    mean = weight @ points
    return Answer(float(total), mean, np.sqrt(weight @ (points - mean) ** 2))


def pumps(t: Floats, y: Floats, points: int = 800) -> Answer:
    """alpha and beta given failures y in times t; the evidence is that of y given t."""
    density, a, b = _pumps(t, y, points)
    return _moments(density, np.stack([a, b], 1))


def rates(t: Floats, y: Floats, points: int = 800) -> tuple[Floats, Floats]:
    """Means and standard deviations of the pumps' own rates: gammas, given alpha and beta."""
    density, a, b = _pumps(t, y, points)
    means = (a[:, None] + y) / (b[:, None] + t)
    answer = _moments(density, means)
    weights = np.exp(density - answer.log_evidence)
    within = weights @ (means / (b[:, None] + t))
    return answer.mean, np.sqrt(answer.sd**2 + within)


def _pumps(t: Floats, y: Floats, points: int) -> tuple[Floats, Floats, Floats]:
    """Log of the joint mass on a grid of logarithms, and its alpha and beta."""
    log_alpha, log_beta = np.linspace(-6, 3, points), np.linspace(-12, 4, points)
    cell = np.log(np.diff(log_alpha)[0] * np.diff(log_beta)[0])
    a, b = (grid.ravel() for grid in np.meshgrid(np.exp(log_alpha), np.exp(log_beta)))
    prior = -a - 0.9 * np.log(b) - b - gammaln(0.1)
    density = prior + np.log(a) + np.log(b) + cell
    for time, count in zip(t, y, strict=True):
        density += gammaln(a + count) - gammaln(a) - gammaln(count + 1) + a * np.log(b)
        density += count * np.log(time) - (a + count) * np.log(b + time)
    return density, a, b


def _log_joint_regression(w: Floats, z: Floats, t: Floats) -> Floats:
    scales = 10.0 ** (1 - np.arange(3))
    prior = -np.abs(w) / scales - np.log(2 * scales)
    residual = t - (w[..., :1] + w[..., 1:2] * z + w[..., 2:] * z**2)
    constant = gammaln(2.5) - gammaln(2.0) - 0.5 * np.log(4 * np.pi)
    return prior.sum(-1) + (constant - 2.5 * np.log1p(residual**2 / 4)).sum(-1)


def regression(z: Floats, t: Floats, points: int = 101, reach: float = 9.0) -> Answer:
    """The three weights given z and t; the evidence is that of t given z."""
    design = np.stack([np.ones_like(z), z, z**2], 1)
    scales = 10.0 ** (1 - np.arange(3))
    starts = [np.linalg.lstsq(design, t, rcond=None)[0], np.zeros(3)]
    found = [
        minimize(lambda w: -_log_joint_regression(w, z, t), w, method="Nelder-Mead", tol=1e-8)
        for w in starts
    ]
    best = min(found, key=lambda result: float(result.fun)).x
    # Axes and widths of the normal that least squares would give; the density is summed as it is.
    precision = design.T @ design / 2 + np.diag(1 / (2 * scales**2))
    axes = np.linalg.cholesky(np.linalg.inv(precision))
    line = np.linspace(-reach, reach, points)
    grid = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1).reshape(-1, 3)
    volume = 3 * np.log(line[1] - line[0]) + np.log(np.abs(np.linalg.det(axes)))
    w = best + grid @ axes.T
    parts = [_log_joint_regression(part, z, t) for part in np.array_split(w, 20)]
    return _moments(np.concatenate(parts) + volume, w)


class FactorialHMM(NamedTuple):
    """Devices of known power, each on or off."""

    power: Floats
    sd: float = 20.0
    initial: float = 0.1
    switch: float = 0.05

    def log_evidence(self, y: Floats) -> float:
        """Forward algorithm over all 2^D states; a step costs D 2^D operations."""
        number = len(self.power)
        states = (np.arange(2**number)[:, None] >> np.arange(number)) & 1
        total = states @ self.power
        log_initial, log_stay = np.log([1 - self.initial, self.initial]), 0.0
        belief = np.exp(log_initial[states].sum(1) + log_stay)
        log_evidence = 0.0
        for step, value in enumerate(y):
            if step:
                cube = belief.reshape((2,) * number)
                for axis in range(number):
                    cube = (1 - self.switch) * cube + self.switch * np.flip(cube, axis)
                belief = cube.ravel()
            log_likelihood = -0.5 * ((value - total) / self.sd) ** 2
            log_likelihood -= np.log(self.sd * np.sqrt(2 * np.pi))
            shift = log_likelihood.max()
            belief = belief * np.exp(log_likelihood - shift)
            log_evidence += shift + np.log(belief.sum())
            belief /= belief.sum()
        return float(log_evidence)

    def optimal(
        self, rng: np.random.Generator, on: Floats, y: float, unit: float = 10.0
    ) -> tuple[NDArray[np.int64], Floats]:
        """x_t ~ p(x_t | x_{t−1}, y_t) for particles with chances `on`, and log p(y_t | x_{t−1})."""
        steps = np.rint(self.power / unit).astype(int)
        cells = int(steps.sum()) + 1
        sums = np.arange(cells) * unit
        log_likelihood = -0.5 * ((y - sums) / self.sd) ** 2
        shift = log_likelihood.max()
        # ahead[d][k, s]: mean likelihood for particle k when devices before d sum to s.
        ahead = [np.broadcast_to(np.exp(log_likelihood - shift), (len(on), cells))]
        for device in reversed(range(len(steps))):
            later = ahead[0]
            moved = np.zeros_like(later)
            moved[:, : cells - steps[device]] = later[:, steps[device] :]
            chance = on[:, device : device + 1]
            ahead.insert(0, (1 - chance) * later + chance * moved)
        x = np.zeros(on.shape, int)
        place = np.zeros(len(on), int)
        rows = np.arange(len(on))
        for device, size in enumerate(steps):
            with_it = on[:, device] * ahead[device + 1][rows, np.minimum(place + size, cells - 1)]
            chance = with_it / ahead[device][rows, place]
            x[:, device] = rng.uniform(size=len(on)) < chance
            place += size * x[:, device]
        constant = shift - np.log(self.sd * np.sqrt(2 * np.pi))
        return x, np.log(ahead[0][:, 0]) + constant
