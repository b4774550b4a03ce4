"""Models with linear algebra or Fourier transforms: no program of theirs hangs on two threads."""

import pytest

# A process of its own, because a hang cannot be interrupted.
SCRIPT = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

import retrodict as rd

x = np.linspace(-1, 1, 11)


def gaussian_process():
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    covariance = scale**2 * jnp.exp(-(((x[:, None] - x) / length) ** 2)) + 1e-3 * jnp.eye(11)
    factor = jnp.linalg.cholesky(covariance)
    z = numpyro.sample("z", dist.Normal(0, 1).expand([11]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(factor @ z)).to_event(1))


def correlated_effects():
    correlation = numpyro.sample("correlation", dist.LKJCholesky(3, 2.0))
    with numpyro.plate("groups", 12):
        effect = numpyro.sample(
            "effect", dist.MultivariateNormal(jnp.zeros(3), scale_tril=correlation)
        )
        numpyro.sample("y", dist.Normal(effect, 0.5).to_event(1))


def state_space():
    covariance = jnp.array([[1.0, 0.3], [0.3, 0.5]])

    def step(state, _):
        rotation = jnp.linalg.inv(jnp.array([[1.0, 0.1], [-0.1, 1.0]]) + 0.01 * jnp.diag(state))
        state = numpyro.sample("state", dist.MultivariateNormal(rotation @ state, covariance))
        numpyro.sample("y", dist.MultivariateNormal(state, covariance_matrix=covariance))
        return state, None

    scan(step, jnp.zeros(2), None, length=20)


def spectrum():
    with numpyro.plate("frequencies", 9):
        amplitude = numpyro.sample("amplitude", dist.Normal(0, 1))
    signal = jnp.fft.irfft(amplitude, 16)
    with numpyro.plate("times", 16):
        numpyro.sample("y", dist.Normal(signal, 0.1))


model = globals()[sys.argv[1]]
training = rd.Training(max_seconds=1.0, dataset_size=4000)
compiled = rd.compile(jax.random.key(0), model, ["y"], training=training, progress_bar=False)
graph = compiled.graph
data = {"y": np.asarray(graph.program.simulate(jax.random.key(1))["y"])}
for method in ("auto", "temper"):
    posterior = compiled.infer(jax.random.key(2), data, 1000, method=method, rescue=False)
    assert np.isfinite(posterior.log_evidence), method
both = {"y": np.stack([data["y"]] * 2)}
posteriors = compiled.infer_many(jax.random.key(3), both, 1000, rescue=False)
assert np.isfinite(posteriors.log_evidence).all()
if model is state_space:
    state = compiled.filter_init(jax.random.key(4), 1000)
    state, _ = compiled.filter_step(jax.random.key(5), state, {"y": data["y"][0]})
"""


@pytest.mark.parametrize(
    "model",
    [
        "gaussian_process",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("correlated_effects", "state_space", "spectrum")
        ),
    ],
)
def test_no_program_hangs_on_two_threads(two_threads, model):
    two_threads(SCRIPT, model)
