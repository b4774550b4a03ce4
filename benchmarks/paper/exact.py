"""Exact evidence and posterior moments of the paper's three models, in NumPy.

Pumps: the rates are integrated out in closed form; the two parameters by quadrature.
Regression: quadrature over the three weights. Factorial HMM: the forward algorithm over all 2^D
states, and samples of the optimal proposal p(x_t | x_{t−1}, y_t) by dynamic programming over sums.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp

Floats = NDArray[np.float64]


class ExactPosterior(NamedTuple):
    """Log evidence, and means and standard deviations of the parameters."""

    log_evidence: float
    mean: Floats
    sd: Floats


def _moments(log_mass: Floats, points: Floats) -> ExactPosterior:
    """Moments of a distribution on grid points, from the log of the joint mass of each cell."""
    log_evidence = logsumexp(log_mass)
    weights = np.exp(log_mass - log_evidence)
    mean = weights @ points
    return ExactPosterior(float(log_evidence), mean, np.sqrt(weights @ (points - mean) ** 2))


def pumps(t: Floats, y: Floats, num_points: int = 800) -> ExactPosterior:
    """Posterior of alpha and beta; the evidence is p(y | t)."""
    log_mass, alpha, beta = _pumps_grid(t, y, num_points)
    return _moments(log_mass, np.stack([alpha, beta], 1))


def pump_rates(t: Floats, y: Floats, num_points: int = 800) -> tuple[Floats, Floats]:
    """Means and standard deviations of the rates, which are gamma given alpha and beta."""
    log_mass, alpha, beta = _pumps_grid(t, y, num_points)
    means = (alpha[:, None] + y) / (beta[:, None] + t)
    posterior = _moments(log_mass, means)
    weights = np.exp(log_mass - posterior.log_evidence)
    mean_of_variances = weights @ (means / (beta[:, None] + t))
    return posterior.mean, np.sqrt(posterior.sd**2 + mean_of_variances)


def _pumps_grid(t: Floats, y: Floats, num_points: int) -> tuple[Floats, Floats, Floats]:
    """Log joint mass of y and each cell of a grid over log alpha and log beta; alpha; beta."""
    log_alpha, log_beta = np.linspace(-6, 3, num_points), np.linspace(-12, 4, num_points)
    log_cell = np.log(np.diff(log_alpha)[0] * np.diff(log_beta)[0])
    alpha, beta = (grid.ravel() for grid in np.meshgrid(np.exp(log_alpha), np.exp(log_beta)))
    log_prior = -alpha - 0.9 * np.log(beta) - beta - gammaln(0.1)
    # The Jacobian of the logarithms is alpha · beta.
    log_mass = log_prior + np.log(alpha) + np.log(beta) + log_cell
    for time, count in zip(t, y, strict=True):
        log_mass += gammaln(alpha + count) - gammaln(alpha) - gammaln(count + 1)
        log_mass += alpha * np.log(beta) + count * np.log(time)
        log_mass -= (alpha + count) * np.log(beta + time)
    return log_mass, alpha, beta


WEIGHT_SCALES = 10.0 ** (1 - np.arange(3))


def regression_log_joint(w: Floats, z: Floats, t: Floats) -> Floats:
    """Log p(w, t | z) for weights of shape (..., 3)."""
    log_prior = -np.abs(w) / WEIGHT_SCALES - np.log(2 * WEIGHT_SCALES)
    residual = t - (w[..., :1] + w[..., 1:2] * z + w[..., 2:] * z**2)
    constant = gammaln(2.5) - gammaln(2.0) - 0.5 * np.log(4 * np.pi)
    return log_prior.sum(-1) + (constant - 2.5 * np.log1p(residual**2 / 4)).sum(-1)


def regression(
    z: Floats, t: Floats, num_points: int = 101, half_width: float = 9.0
) -> ExactPosterior:
    """Posterior of the three weights; the evidence is p(t | z).

    The grid is centred at the mode. Its axes and widths are those of the normal posterior that
    least squares would give; the density itself is the model's.
    """
    design = np.stack([np.ones_like(z), z, z**2], 1)
    starts = [np.linalg.lstsq(design, t, rcond=None)[0], np.zeros(3)]
    optima = [
        minimize(lambda w: -regression_log_joint(w, z, t), w, method="Nelder-Mead", tol=1e-8)
        for w in starts
    ]
    mode = min(optima, key=lambda optimum: float(optimum.fun)).x
    precision = design.T @ design / 2 + np.diag(1 / (2 * WEIGHT_SCALES**2))
    axes = np.linalg.cholesky(np.linalg.inv(precision))
    line = np.linspace(-half_width, half_width, num_points)
    grid = np.stack(np.meshgrid(line, line, line, indexing="ij"), -1).reshape(-1, 3)
    log_cell = 3 * np.log(line[1] - line[0]) + np.log(np.abs(np.linalg.det(axes)))
    w = mode + grid @ axes.T
    # In parts, to save memory.
    log_joint = [regression_log_joint(part, z, t) for part in np.array_split(w, 20)]
    return _moments(np.concatenate(log_joint) + log_cell, w)


class FactorialHMM(NamedTuple):
    """The factorial HMM.

    Attributes:
        power: of each device, (devices,).
        sd: of the meter's noise.
        initial: probability that a device is on at the first step.
        switch: probability that a device changes its state from one step to the next.
    """

    power: Floats
    sd: float = 20.0
    initial: float = 0.1
    switch: float = 0.05

    def log_evidence(self, y: Floats) -> float:
        """Forward algorithm over all 2^D states; a step costs D 2^D operations."""
        num_devices = len(self.power)
        states = (np.arange(2**num_devices)[:, None] >> np.arange(num_devices)) & 1
        total_power = states @ self.power
        belief = np.exp(np.log([1 - self.initial, self.initial])[states].sum(1))
        log_evidence = 0.0
        for step, y_t in enumerate(y):
            if step:
                cube = belief.reshape((2,) * num_devices)
                for axis in range(num_devices):
                    cube = (1 - self.switch) * cube + self.switch * np.flip(cube, axis)
                belief = cube.ravel()
            log_likelihood = -0.5 * ((y_t - total_power) / self.sd) ** 2
            log_likelihood -= np.log(self.sd * np.sqrt(2 * np.pi))
            shift = log_likelihood.max()
            belief = belief * np.exp(log_likelihood - shift)
            log_evidence += shift + np.log(belief.sum())
            belief /= belief.sum()
        return float(log_evidence)

    def sample_optimal(
        self, rng: np.random.Generator, chance_on: Floats, y: float, unit: float = 10.0
    ) -> tuple[NDArray[np.int64], Floats]:
        """Sample x_t ~ p(x_t | x_{t−1}, y_t).

        Args:
            rng: NumPy's generator.
            chance_on: p(x_t = 1 | x_{t−1}) of each particle and device, (particles, devices).
            y: the observation.
            unit: common divisor of all devices' power.

        Returns:
            x_t, (particles, devices), and log p(y_t | x_{t−1}), (particles,).
        """
        power = np.rint(self.power / unit).astype(int)
        num_sums = int(power.sum()) + 1
        log_likelihood = -0.5 * ((y - np.arange(num_sums) * unit) / self.sd) ** 2
        shift = log_likelihood.max()
        # messages[d][k, s]: expected likelihood of particle k when the devices before d sum to s.
        messages = [np.broadcast_to(np.exp(log_likelihood - shift), (len(chance_on), num_sums))]
        for device in reversed(range(len(power))):
            off, on = messages[0], np.zeros_like(messages[0])
            on[:, : num_sums - power[device]] = off[:, power[device] :]
            chance = chance_on[:, device : device + 1]
            messages.insert(0, (1 - chance) * off + chance * on)
        x = np.zeros(chance_on.shape, int)
        sums = np.zeros(len(chance_on), int)
        particles = np.arange(len(chance_on))
        for device, watts in enumerate(power):
            message_on = messages[device + 1][particles, np.minimum(sums + watts, num_sums - 1)]
            chance = chance_on[:, device] * message_on / messages[device][particles, sums]
            x[:, device] = rng.uniform(size=len(chance_on)) < chance
            sums += watts * x[:, device]
        constant = shift - np.log(self.sd * np.sqrt(2 * np.pi))
        return x, np.log(messages[0][:, 0]) + constant
