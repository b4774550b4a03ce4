"""sbi's amortized posterior, for `benchmarks.newdata` and `benchmarks.compiling`, in its own place.

`train FILE SECONDS [SAVED]` takes simulations (u, x: real coordinates of latents, and data) from an
.npz file, trains NPE with its default masked autoregressive flow until it stops by itself or the
time is up, and writes seconds and validation loss after every epoch. `serve MODEL FILE SAVED` then
answers lines with a number of draws and a seed: seconds, least and mean effective samples, means.
Draws are weighted by sbi's importance sampling with the model's density, written out below.
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
IN_A_ROW = 5  # as in inferring.py
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


class Timed(NPE):
    """Stops when the time is up as well."""

    limit = float("inf")

    def _converged(self, epoch, stop_after_epochs):
        done = super()._converged(epoch, stop_after_epochs)
        if not done and time.perf_counter() > self.limit:
            self._neural_net.load_state_dict(self._best_model_state_dict)
            return True
        return done

    def _summarize_epoch(self, train_loss, val_loss, start, kwargs):
        super()._summarize_epoch(train_loss, val_loss, start, kwargs)
        self.seen.append((time.perf_counter() - self.begun, val_loss))


class Wide(dist.Distribution):
    """A prior of which a single round needs the support only: all real vectors."""

    support = dist.constraints.real_vector

    def __init__(self, size):
        super().__init__(event_shape=torch.Size([size]), validate_args=False)

    def sample(self, shape=()):
        """Any draws."""
        return 10 * torch.randn(*shape, *self.event_shape)

    def log_prob(self, value):
        """Flat."""
        return torch.zeros(value.shape[:-1])


def train(path, seconds, saved=None):
    """Write the curve, and keep the posterior."""
    torch.manual_seed(0)
    held = np.load(path)
    u, x = (torch.as_tensor(held[name], dtype=torch.float32) for name in ("u", "x"))
    inference = Timed(prior=Wide(u.shape[1]), show_progress_bars=False)
    inference.begun, inference.seen = time.perf_counter(), []
    inference.limit = inference.begun + seconds
    inference.append_simulations(u, x)
    inference.train()
    if saved:
        Path(saved).write_bytes(pickle.dumps(inference.build_posterior()))
    for when, loss in inference.seen:
        print(when, loss, flush=True)


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


class Proposal:
    """The posterior without the normalisation that a prior of full support does not need."""

    def __init__(self, posterior):
        self.posterior = posterior

    def sample(self, shape, **_):
        """Draws from the flow."""
        return self.posterior.sample(shape, show_progress_bars=False)

    def log_prob(self, u):
        """log q."""
        return self.posterior.log_prob(u, norm_posterior=False)


def serve(name, path, saved):
    """Answer requests."""
    density, latents = MODELS[name]
    observed = torch.as_tensor(np.load(path)["observed"], dtype=torch.float32)
    begun = time.perf_counter()
    posterior = pickle.loads(Path(saved).read_bytes()).set_default_x(observed)
    weighted = ImportanceSamplingPosterior(
        lambda u, x: density(u, x.reshape(-1)), Proposal(posterior), method="importance"
    ).set_default_x(observed)
    print(time.perf_counter() - begun, flush=True)
    for line in sys.stdin:
        what, *asked = line.split()
        number, seed = map(int, asked)
        torch.manual_seed(seed)
        taken = []
        for _ in range(1 if what == "first" else IN_A_ROW):
            begun = time.perf_counter()
            with torch.no_grad():
                u, log_weights = weighted.sample((number,))
            taken.append(time.perf_counter() - begun)
        seconds = float(np.median(taken))
        weights = torch.softmax(log_weights.double().nan_to_num(-torch.inf), 0).numpy()[:, None]
        # draws far out, of no weight, may overflow
        values = np.where(weights > 0, latents(u.double().numpy()), 0.0)
        mean = (weights * values).sum(0)
        variance = (weights * (values - mean) ** 2).sum(0)
        sizes = variance / (weights**2 * (values - mean) ** 2).sum(0)
        print(seconds, sizes.min(), sizes.mean(), seconds, *mean, flush=True)


if __name__ == "__main__":
    # sbi prints of its own accord; what is written here is for the other side alone
    channel = os.dup(1)
    os.dup2(2, 1)
    answers = os.fdopen(channel, "w")
    printed = print

    def print(*words, **options):
        """To the other side."""
        printed(*words, file=answers, **options)

    command, *arguments = sys.argv[1:]
    if command == "train":
        train(arguments[0], float(arguments[1]), *arguments[2:])
    else:
        serve(*arguments)
