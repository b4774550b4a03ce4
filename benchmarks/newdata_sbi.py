"""sbi's amortized posterior, for `benchmarks.newdata` and `benchmarks.compiling`.

Runs in its own environment. `train FILE SECONDS [SAVED]` reads simulations (u, x: real coordinates
of latents, and data) from an .npz file, trains NPE with its default masked autoregressive flow
until it converges or the time is up, and prints seconds and validation loss of every epoch. `serve
MODEL FILE SAVED` then answers input lines with a number of draws and a seed: seconds, minimum and
mean of the effective samples, seconds again, and means. Draws are weighted by sbi's importance
sampling with the model's density, which is defined below.
"""

import os
import pickle
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from sbi.inference import NPE
from sbi.inference.posteriors import ImportanceSamplingPosterior
from torch import distributions as dist

warnings.simplefilter("ignore")
CALLS_IN_A_ROW = 5  # as in newdata_worker.py
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


class TimeLimitedNPE(NPE):
    """NPE that also stops at a time limit, and records its losses."""

    limit = float("inf")

    def _converged(self, epoch, stop_after_epochs):
        converged = super()._converged(epoch, stop_after_epochs)
        if not converged and time.perf_counter() > self.limit:
            self._neural_net.load_state_dict(self._best_model_state_dict)
            return True
        return converged

    def _summarize_epoch(self, train_loss, val_loss, start, kwargs):
        super()._summarize_epoch(train_loss, val_loss, start, kwargs)
        self.curve.append((time.perf_counter() - self.start_time, val_loss))


class RealPrior(dist.Distribution):
    """A flat prior on real vectors: single-round NPE uses only the support."""

    support = dist.constraints.real_vector

    def __init__(self, size):
        super().__init__(event_shape=torch.Size([size]), validate_args=False)

    def sample(self, shape=()):
        """Sample arbitrary vectors."""
        return 10 * torch.randn(*shape, *self.event_shape)

    def log_prob(self, value):
        """Return zeros."""
        return torch.zeros(value.shape[:-1])


def train(path, seconds, saved=None):
    """Train, print the loss curve, and save the posterior."""
    torch.manual_seed(0)
    arrays = np.load(path)
    u, x = (torch.as_tensor(arrays[name], dtype=torch.float32) for name in ("u", "x"))
    inference = TimeLimitedNPE(prior=RealPrior(u.shape[1]), show_progress_bars=False)
    inference.start_time, inference.curve = time.perf_counter(), []
    inference.limit = inference.start_time + seconds
    inference.append_simulations(u, x)
    inference.train()
    if saved:
        Path(saved).write_bytes(pickle.dumps(inference.build_posterior()))
    for elapsed, loss in inference.curve:
        print(elapsed, loss, flush=True)


def pumps(u, x):
    """log p(latents, y | t) at log alpha, log beta, log theta; x holds log t and log(1 + y)."""
    alpha, beta, theta = u[:, :1].exp(), u[:, 1:2].exp(), u[:, 2:].exp()
    t, y = x[:10].exp(), x[10:].expm1().round()
    density = dist.Exponential(1.0).log_prob(alpha) + dist.Gamma(0.1, 1.0).log_prob(beta)
    rates = dist.Gamma(alpha, beta).log_prob(theta) + dist.Poisson(theta * t).log_prob(y)
    return density[:, 0] + rates.sum(1) + u.sum(1)


def schools(u, x):
    """log p(latents, y) at mu, log tau, (theta − mu) / tau; x holds arcsinh(y / 10)."""
    mu, tau, eta = u[:, :1], u[:, 1:2].exp(), u[:, 2:]
    density = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau)
    effects = dist.Normal(0.0, 1.0).log_prob(eta)
    effects += dist.Normal(mu + tau * eta, ERRORS).log_prob(10 * x.sinh())
    return density[:, 0] + effects.sum(1) + u[:, 1]


def pumps_latents(u):
    """Latents from their coordinates."""
    return np.exp(u)


def schools_latents(u):
    """Latents from their coordinates."""
    mu, tau = u[:, :1], np.exp(u[:, 1:2])
    return np.concatenate([mu, tau, mu + tau * u[:, 2:]], 1)


MODELS = {"pumps": (pumps, pumps_latents), "schools": (schools, schools_latents)}


class UnnormalisedPosterior:
    """The posterior without sbi's normalisation, which a prior of full support does not need."""

    def __init__(self, posterior):
        self.posterior = posterior

    def sample(self, shape, **_):
        """Sample from the flow."""
        return self.posterior.sample(shape, show_progress_bars=False)

    def log_prob(self, u):
        """log q."""
        return self.posterior.log_prob(u, norm_posterior=False)


def serve(name, path, saved):
    """Answer requests."""
    density, latents = MODELS[name]
    observed = torch.as_tensor(np.load(path)["observed"], dtype=torch.float32)
    start_time = time.perf_counter()
    posterior = pickle.loads(Path(saved).read_bytes()).set_default_x(observed)
    weighted = ImportanceSamplingPosterior(
        lambda u, x: density(u, x.reshape(-1)),
        UnnormalisedPosterior(posterior),
        method="importance",
    ).set_default_x(observed)
    print(time.perf_counter() - start_time, flush=True)
    for line in sys.stdin:
        request, *numbers = line.split()
        number, seed = map(int, numbers)
        torch.manual_seed(seed)
        times = []
        for _ in range(1 if request == "first" else CALLS_IN_A_ROW):
            start_time = time.perf_counter()
            with torch.no_grad():
                u, log_weights = weighted.sample((number,))
            times.append(time.perf_counter() - start_time)
        seconds = float(np.median(times))
        weights = torch.softmax(log_weights.double().nan_to_num(-torch.inf), 0).numpy()[:, None]
        # Draws of zero weight may overflow.
        values = np.where(weights > 0, latents(u.double().numpy()), 0.0)
        mean = (weights * values).sum(0)
        variance = (weights * (values - mean) ** 2).sum(0)
        sizes = variance / (weights**2 * (values - mean) ** 2).sum(0)
        print(seconds, sizes.min(), sizes.mean(), seconds, *mean, flush=True)


if __name__ == "__main__":
    # sbi prints to standard output: redirect that to standard error, and keep the original
    # for the answers.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    answer_stream = os.fdopen(descriptor, "w")
    builtin_print = print

    def print(*words, **options):
        """Print to the original standard output."""
        builtin_print(*words, file=answer_stream, **options)

    command, *arguments = sys.argv[1:]
    if command == "train":
        train(arguments[0], float(arguments[1]), *arguments[2:])
    else:
        serve(*arguments)
