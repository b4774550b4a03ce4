"""MCMC kernels: divergent trajectories are rejected, and moves leave the target invariant."""

from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from blackjax.mcmc import hmc
from scipy import stats

import retrodict as rd
from retrodict.inference.mcmc_kernels import (
    MCMCKernels,
    MoveContext,
    Tuning,
    tempered_log_density,
)
from retrodict.inference.tempered_target import Particle, TemperedTarget
from retrodict.proposal.proposal import Proposal
from zoo import key


def group_means(y=None):
    """Group means with an unknown spread."""
    centre = numpyro.sample("centre", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 6):
        mean = numpyro.sample("mean", dist.Normal(centre, spread))
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def divergent_kernel(rng_key, state, log_density, step, metric, number):
    """A kernel that accepts a far end point, as HMC does when its energy has overflowed."""
    end = state._replace(position=state.position + 30.0)
    info = SimpleNamespace(acceptance_rate=jnp.ones(()), proposal=end)
    return end, info


@pytest.mark.parametrize("divergent", [True, False])
def test_divergent_trajectories_are_rejected(monkeypatch, divergent):
    """With a dense metric the energy of a divergent trajectory may overflow to minus infinity."""
    if divergent:
        monkeypatch.setattr(hmc, "build_kernel", lambda: divergent_kernel)
    proposal = Proposal.of(rd.invert(rd.trace(group_means, ("y",))))
    target, data = TemperedTarget(proposal), {"y": jnp.linspace(-3.0, 3.0, 6)}
    kernels, num_particles = MCMCKernels(target), 200
    context = MoveContext({}, data, jnp.asarray(0.5), 0.5)

    def initial(rng_key):
        return kernels.score(target.sample_prior(rng_key, data), data)

    particles = jax.jit(jax.vmap(initial))(jax.random.split(key(0), num_particles))
    z = particles.particle.z
    dense = jnp.cov(z.T) + 1e-3 * jnp.eye(z.shape[1])
    tuning = Tuning(jnp.stack([dense, dense]), jnp.array([0.3, 0.3]), jnp.ones(1))
    moved, info = jax.jit(
        jax.vmap(lambda k, particle: kernels.sweep(k, particle, context, tuning, jnp.array(0)))
    )(jax.random.split(key(1), num_particles), particles)
    unchanged = np.all(np.asarray(moved.particle.z == z), 1)
    if divergent:
        assert unchanged.all()
        assert np.all(np.asarray(info.trajectory_acceptance) == 0)
        assert np.all(np.asarray(info.expected_jump) == 0)
    else:
        assert unchanged.mean() < 0.9
    rescored = jax.jit(jax.vmap(lambda p: kernels.score(p, data)))(moved.particle)
    np.testing.assert_allclose(
        tempered_log_density(moved.densities, context.lam),
        tempered_log_density(rescored.densities, context.lam),
        rtol=1e-4,
        atol=1e-3,
    )


PROBABILITIES, LEVELS = np.array([0.5, 0.3, 0.2]), np.array([-1.0, 0.5, 2.0])


def coupled_categories():
    """Two categories, coupled by an observation of their sum."""
    with numpyro.plate("n", 2):
        state = numpyro.sample("state", dist.Categorical(jnp.asarray(PROBABILITIES)))
        level = jnp.asarray(LEVELS)[state]
        numpyro.sample("y", dist.Normal(level, 1.0))
    numpyro.sample("total", dist.Normal(level.sum(), 1.0))


@pytest.mark.parametrize("num_changes", [1.0, 2.0])
def test_discrete_moves_leave_the_tempered_target_invariant(num_changes):
    """States from the enumerated target have the same distribution after two sweeps."""
    data = {"y": jnp.array([0.2, 1.0]), "total": jnp.array(1.2)}
    proposal = Proposal.of(rd.invert(rd.trace(coupled_categories, tuple(data)), "faithful"))
    networks = {
        name: proposal.build(rd.MADE(hidden=(8,), components=2, context=(4,)), key(), structures)
        for name, structures in proposal.networks().items()
    }
    kernels, lam = MCMCKernels(TemperedTarget(proposal)), 0.6
    states = np.array(list(product(range(3), repeat=2)))
    log_target = np.log(PROBABILITIES[states]).sum(1)
    log_target += lam * stats.norm.logpdf(data["y"], LEVELS[states], 1.0).sum(1)
    log_target += lam * stats.norm.logpdf(data["total"], LEVELS[states].sum(1), 1.0)
    target = np.exp(log_target - log_target.max())
    target /= target.sum()

    num_particles = 20_000
    start = np.random.default_rng(0).choice(len(states), num_particles, p=target)
    context = MoveContext(networks, data, jnp.asarray(lam), 0.5)
    tuning = Tuning(jnp.zeros((2, 0)), jnp.ones(2), jnp.full(2, num_changes))

    def two_sweeps(rng_key, state):
        particle = kernels.score(Particle(jnp.zeros(0), {"state": state}), data)
        for sweep_key in jax.random.split(rng_key):
            particle, info = kernels.sweep(sweep_key, particle, context, tuning, jnp.array(0))
        return particle.particle.discrete["state"], info.change_acceptance

    keys = jax.random.split(key(1), num_particles)
    moved, acceptance = jax.jit(jax.vmap(two_sweeps))(keys, jnp.asarray(states[start], jnp.int32))
    end = np.asarray(moved) @ np.array([3, 1])
    assert np.all(np.asarray(acceptance).mean(0) > 0.05)
    assert np.mean(end != start) > 0.2
    # changes from and to each state balance, within 4 standard errors of the difference
    for state in range(len(states)):
        difference = (end == state).astype(float) - (start == state)
        assert difference.std() > 0
        assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(num_particles)
