"""Tests of posterior figures, which read the data back from matplotlib's artists."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot
from matplotlib.collections import LineCollection

import retrodict as rd
from retrodict.particles.make_posterior import make_posterior
from retrodict.plotting.posterior import draw_prior
from retrodict.plotting.weighted_statistics import (
    central_interval,
    highest_density_levels,
    weighted_density,
    weighted_joint_density,
)
from zoo import key


def posterior(num=2000, **fields):
    """Return draws from N(0, 1) weighted towards N(1, 1), with a count and a boolean."""
    x, z = jax.random.normal(key(), (2, num))
    count = jax.random.poisson(key(1), 3.0, (num,))
    samples = {"x": x, "y": 0.8 * x + 0.6 * z, "count": count, "up": x > 0}
    return make_posterior(samples, x, **fields)


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title() == title)


def test_marginals_show_prior_and_posterior():
    prior = {"x": np.random.default_rng(0).normal(0, 1, 4000), "count": np.full(4000, 2)}
    figure = posterior().plot(prior=prior)
    curves = {line.get_label(): line.get_data() for line in panel(figure, "x").lines}
    for label, mean in (("prior", 0.0), ("posterior", 1.0)):
        x, density = curves[label]
        assert np.average(x, weights=density) == pytest.approx(mean, abs=0.15)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["prior", "posterior"]
    bars = {c.get_label(): c.patches for c in panel(figure, "count").containers}
    assert [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars["prior"]] == [
        (2, 1.0)
    ]
    heights = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in bars["posterior"]}
    p = posterior()
    weights = np.exp(p.log_weights)
    expected = np.sum(weights[np.asarray(p.samples["count"]) == 3])
    assert heights[3] == pytest.approx(expected, rel=1e-4)
    assert {line.get_label() for line in panel(figure, "y").lines}.isdisjoint({"prior"})


def test_axis_limits_follow_the_posterior_if_the_prior_is_far_wider():
    prior = {"x": np.random.default_rng(0).standard_cauchy(4000) * 1e6}
    axes = panel(posterior().plot(("x",), prior=prior), "x")
    low, high = axes.get_xlim()
    assert high - low < 40


def test_long_sites_show_the_prior_as_a_band_of_its_quartiles():
    values = jax.random.normal(key(), (500, 9))
    p = make_posterior({"long": values}, jnp.zeros(500))
    prior = {"long": np.random.default_rng(0).normal(0, 1, (4000, 9))}
    (axes,) = p.plot(prior=prior).axes
    (band,) = (c for c in axes.collections if type(c).__name__ == "FillBetweenPolyCollection")
    points = band.get_paths()[0].vertices
    # The quartiles of a standard normal distribution, with five standard errors.
    assert points[:, 1].max() == pytest.approx(0.674, abs=0.1)
    assert points[:, 1].min() == pytest.approx(-0.674, abs=0.1)


def test_pairs_show_weighted_particles():
    pyplot_figures = pyplot.get_fignums()
    figure = posterior().plot(("x", "y", "count"), kind="pairs")
    assert pyplot.get_fignums() == pyplot_figures
    visible = [axes for axes in figure.axes if axes.axison]
    assert len(visible) == 6
    joint = next(a for a in visible if a.get_ylabel() == "y")
    scatter = joint.collections[0]
    x, y = np.asarray(scatter.get_offsets()).T
    p = posterior()
    np.testing.assert_allclose(x, p.samples["x"], rtol=1e-5)
    np.testing.assert_allclose(y, p.samples["y"], rtol=1e-5)
    sizes = scatter.get_sizes()
    assert np.corrcoef(sizes, np.exp(p.log_weights))[0, 1] > 0.8
    with pytest.raises(
        ValueError, match="needs 2 to 8 scalars, but these sites have 1: select sites"
    ):
        p.plot(("x",), kind="pairs")
    with pytest.raises(ValueError, match=r"kind must be one of 'marginals', .*, got 'pear'"):
        p.plot(kind="pear")


def test_filtered_bands_are_weighted_quantiles():
    steps, num = 12, 500
    rng = np.random.default_rng(0)
    path = rng.normal(size=(steps, num)) + np.arange(steps)[:, None]
    log_weights = np.where(path > np.arange(steps)[:, None], 0.0, -np.inf)
    log_weights -= np.log(np.exp(log_weights).sum(1, keepdims=True))
    p = make_posterior(
        {"h": jnp.asarray(path.T), "x": jnp.zeros(num)},
        jnp.zeros(num),
        filtered={"h": jnp.asarray(path)},
        filtered_log_weights=jnp.asarray(log_weights),
    )
    (axes,) = p.plot(kind="filtered").axes
    medians = [np.median(row[row > t]) for t, row in enumerate(path)]
    tolerance = 5 * 0.6 / np.sqrt(num / 2)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), medians, atol=tolerance)
    with pytest.raises(ValueError, match="no filtered series for the sites x, y, count, up"):
        posterior().plot(kind="filtered")


def test_ancestry_shows_the_lineages_of_the_final_particles():
    """Compare three stages of four particles with lineages worked out by hand."""
    parents = jnp.array([[0, 0, 2, 3], [0, 1, 1, 0], [1, 2, 3, 3]])
    p = make_posterior(
        {"x": jnp.arange(4.0)}, jnp.zeros(4), ancestors=parents, ess_by_stage=jnp.full(3, 2.0)
    )
    tree, count = p.plot(kind="ancestry").axes
    # Lineages by hand: ancestors 1, 2, 3, 3, then 1, 1, 0, 0, then 0, 0, 0, 0.
    np.testing.assert_array_equal(count.lines[0].get_ydata(), [1, 2, 3, 4])
    (lines,) = (c for c in tree.collections if isinstance(c, LineCollection))
    heights = np.array([path.vertices[:, 1] for path in lines.get_paths()])
    assert len(heights) == 4
    np.testing.assert_allclose(heights[:, 3], np.linspace(0, 1, 4))
    # One common ancestor: a bundle of half the width. Then two ancestors, with a gap between.
    np.testing.assert_allclose(heights[:, 0], np.linspace(0.25, 0.75, 4))
    np.testing.assert_allclose(np.diff(heights[:, 1]), [1 / 6, 1 / 2, 1 / 6])
    assert np.all(np.diff(heights, axis=0) > 0)  # branches do not cross
    with pytest.raises(ValueError, match="has no ancestry: use a method that resamples"):
        posterior().plot(kind="ancestry")


def test_prior_draws_follow_the_model():
    def model(n=3):
        mu = numpyro.sample("mu", dist.Normal(2.0, 1.0))
        numpyro.deterministic("twice", 2 * mu)
        with numpyro.plate("n", n):
            numpyro.sample("y", dist.Normal(mu, 1))

    draws = draw_prior(key(), rd.trace(model, ["y"]), 4000)
    assert set(draws) == {"mu", "twice"}
    assert draws["mu"].shape == (4000,)
    np.testing.assert_allclose(draws["twice"], 2 * draws["mu"], rtol=1e-6)
    assert draws["mu"].mean() == pytest.approx(2.0, abs=4 / np.sqrt(4000))


def test_density_within_an_interval_integrates_to_its_probability():
    values = np.random.default_rng(0).normal(size=20_000)
    x, density = weighted_density(values, np.ones(20_000), within=(-1.0, 1.0))
    assert x.min() >= -1 and x.max() <= 1
    assert np.sum(density) * (x[1] - x[0]) == pytest.approx(0.6827, abs=0.015)
    assert density[len(x) // 2] == pytest.approx(1 / np.sqrt(2 * np.pi), rel=0.05)


def test_highest_density_regions_have_their_probability():
    """The region of probability p of a bivariate normal has the radius √(−2 log(1 − p))."""
    x, y = np.random.default_rng(0).normal(size=(2, 50_000))
    grid_x, grid_y, density = weighted_joint_density(x, y, np.ones(50_000), ((-5, 5), (-5, 5)))
    levels = highest_density_levels(density, (0.5, 0.94))
    for probability, level in zip((0.94, 0.5), levels, strict=True):
        inside = density > level
        cell = (grid_x[1] - grid_x[0]) * (grid_y[1] - grid_y[0])
        radius = np.sqrt(inside.sum() * cell / np.pi)
        assert radius == pytest.approx(np.sqrt(-2 * np.log(1 - probability)), rel=0.05)


def test_central_intervals_use_the_weights():
    values = np.arange(101.0)
    assert central_interval(values, np.ones(101), 0.9) == (5.0, 95.0)
    assert central_interval(values, np.where(values < 51, 1.0, 0.0), 0.9) == (2.0, 48.0)
