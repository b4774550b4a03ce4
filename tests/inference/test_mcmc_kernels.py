"""Moves against what they must leave as it is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from blackjax.mcmc import hmc

import retrodict as rd
from retrodict.inference.mcmc_kernels import Moves, Place, Tuning, Walker, level
from retrodict.inference.tempered_target import Target
from retrodict.proposal.proposal import Proposal
from zoo import key


def scales(y=None):
    """A group of means whose own spread is not known."""
    centre = numpyro.sample("centre", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 6):
        mean = numpyro.sample("mean", dist.Normal(centre, spread))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def fly_off(rng_key, state, log_density, step, metric, number):
    """A kernel that accepts to end far away, as one does whose energy has overflowed."""
    gone = state._replace(position=state.position + 30.0)
    info = SimpleNamespace(acceptance_rate=jnp.ones(()), proposal=gone)
    return gone, info


@pytest.mark.parametrize("flies_off", [True, False])
def test_a_trajectory_that_flies_off_is_not_followed(monkeypatch, flies_off):
    """In float32, with a dense metric, the energy of such a one may overflow to minus infinity."""
    if flies_off:
        monkeypatch.setattr(hmc, "build_kernel", lambda: fly_off)
    proposal = Proposal.of(rd.invert(rd.trace(scales, ("y",))))
    target, data = Target(proposal), {"y": jnp.linspace(-3.0, 3.0, 6)}
    moves, number = Moves(target), 200
    place = Place({}, data, jnp.asarray(0.5))

    def begun(rng_key):
        particle = target.draw_prior(rng_key, data)
        return Walker(particle, target.densities(data, particle))

    walkers = jax.jit(jax.vmap(begun))(jax.random.split(key(0), number))
    rows = walkers.particle.z
    dense = jnp.cov(rows.T) + 1e-3 * jnp.eye(rows.shape[1])
    tuning = Tuning(jnp.stack([dense, dense]), jnp.array([0.3, 0.3]), jnp.ones(1))
    moved, seen = jax.jit(
        jax.vmap(lambda k, walker: moves.sweep(k, walker, place, tuning, jnp.array(0)))
    )(jax.random.split(key(1), number), walkers)
    stayed = np.all(np.asarray(moved.particle.z == rows), 1)
    if flies_off:
        assert stayed.all()
        assert np.all(np.asarray(seen.trajectory) == 0) and np.all(np.asarray(seen.jump) == 0)
    else:
        assert stayed.mean() < 0.9
    levels = jax.jit(jax.vmap(lambda walker: level(walker.densities, place)))(moved)
    anew = jax.vmap(lambda walker: level(target.densities(data, walker.particle), place))
    again = jax.jit(anew)(moved)
    np.testing.assert_allclose(levels, again, rtol=1e-4, atol=1e-3)
