"""Sites and plates may have any names, also those that resemble the library's own keys."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import retrodict as rd
from zoo import key

TRAINING = rd.Training(max_steps=150, batch_size=64, dataset_size=1024, heldout_size=256)
SMALL = rd.MADE(hidden=(16,), components=3)
SPREAD = np.array([0.5, 1.0, 2.0, 1.0])


def hierarchy(names):
    """A normal hierarchy with known scales; names of the mean, effects, data and plate."""
    mean, effect, data, plate = names

    def model(y=None):
        mu = numpyro.sample(mean, dist.Normal(0.0, 2.0))
        with numpyro.plate(plate, 4):
            theta = numpyro.sample(effect, dist.Normal(mu, 1.0))
            numpyro.sample(data, dist.Normal(theta, SPREAD), obs=y)

    return model


def hierarchy_log_evidence(y):
    covariance = np.diag(SPREAD**2 + 1) + 4.0
    return float(dist.MultivariateNormal(jnp.zeros(4), covariance).log_prob(jnp.asarray(y)))


@pytest.mark.parametrize(
    "names",
    [
        ("mask", "expected", "y design", "members"),
        ("y", "carry 0.0", "y itself", "y members"),
        ("x of y", "x by y", "x | y", "time 0"),
        ("x itself", "x", "x design", " of "),
    ],
    ids=" / ".join,
)
@pytest.mark.parametrize("estimator", [rd.MADE(), SMALL], ids=["analytic", "learned"])
def test_names_that_resemble_internal_keys(names, estimator):
    model, y = hierarchy(names), np.array([0.3, -1.0, 2.0, 0.1])
    compiled = rd.compile(
        key(0), model, (names[2],), estimator=estimator, training=TRAINING, progress_bar=False
    )
    posterior = compiled.infer(key(1), {names[2]: y}, 4000, rescue=False)
    error = abs(float(posterior.log_evidence) - hierarchy_log_evidence(y))
    assert error < 4 * float(posterior.log_evidence_se) + 1e-3
    assert set(posterior.samples) == set(names[:2])


@pytest.mark.parametrize(
    "names", [("carry 0.0", "carry 0.0 itself"), ("time 0", "x design"), ("x+1", "x")]
)
def test_names_in_a_scan(names):
    latent, data = names

    def model(y=None):
        def step(x, y_t):
            x = numpyro.sample(latent, dist.Normal(0.8 * x, 0.6))
            numpyro.sample(data, dist.Normal(x, 0.5), obs=y_t)
            return x, None

        scan(step, 0.0, y, length=5)

    compiled = rd.compile(
        key(0), model, (data,), estimator=SMALL, training=TRAINING, progress_bar=False
    )
    y = np.array([0.2, 1.0, 0.4, -0.3, 0.0])
    posterior = compiled.infer(key(1), {data: y}, 2000, rescue=False)
    covariance = np.zeros((5, 5))
    for i in range(5):
        for j in range(5):
            shared = sum(0.36 * 0.64**k for k in range(min(i, j) + 1))
            covariance[i, j] = shared * 0.8 ** abs(i - j)
    exact = dist.MultivariateNormal(jnp.zeros(5), covariance + 0.25 * np.eye(5)).log_prob(y)
    error = abs(float(posterior.log_evidence) - float(exact))
    assert error < 4 * float(posterior.log_evidence_se) + 1e-3
    samples = jax.tree.map(np.shape, posterior.samples)
    assert samples == {latent: (2000, 5)}
