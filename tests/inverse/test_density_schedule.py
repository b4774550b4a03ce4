"""The density schedule against brute force on the unrolled graph."""

from collections import Counter
from functools import cache

import networkx as nx
import numpyro
import numpyro.distributions as dist
import pytest

import retrodict as rd
from retrodict.inverse.density_schedule import DensitySchedule
from retrodict.inverse.plate_tree import divisible, needing_marginals
from zoo import CASES

all_cases = pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in CASES for method in ("blanket", "faithful", "filter")],
)


@cache
def schedule_of(name, method):
    case = CASES[name]
    graph = rd.trace(case.model, case.observed, model_kwargs=case.kwargs)
    return DensitySchedule(rd.invert(graph, method).lifted)


def sites_by_variable(schedule):
    """The site of every variable; the variables of a Python loop have names of their own."""
    sites = schedule.graph.sites.values()
    return {site.variable(index): site.name for site in sites for index in site.indices()}


@all_cases
def test_stages_follow_the_sampling_order(name, method):
    schedule = schedule_of(name, method)
    site_of = sites_by_variable(schedule)
    stages = [schedule.sampling_stage[site_of[variable]] for variable in schedule.inverse.order]
    assert stages == sorted(stages)
    assert set(stages) == set(range(len(schedule.stages)))
    assert [f for stage in schedule.stages for f in stage] == list(schedule.inverse.factors)


@all_cases
def test_each_density_is_counted_once_when_its_last_variable_is_sampled(name, method):
    schedule = schedule_of(name, method)
    unrolled, site_of = schedule.graph.unroll(), sites_by_variable(schedule)

    def stage(variable):
        return schedule.sampling_stage.get(site_of[variable], 0)

    expected = {}
    for variable in unrolled:
        last = max(map(stage, (variable, *unrolled.predecessors(variable))))
        site = site_of[variable]
        expected[site] = max(expected.get(site, 0), last)
    for site in schedule.prior_latents:
        del expected[site]
    counts = Counter((site, n) for n, sites in enumerate(schedule.closing) for site in sites)
    assert counts == dict.fromkeys(expected.items(), 1)
    assert schedule.closing_stage == expected
    assert set(schedule.counted) == set(expected)


# A filter also samples steps without observations of their own from the prior.
@pytest.mark.parametrize("method", ["blanket", "faithful"])
@pytest.mark.parametrize("name", CASES)
def test_latents_from_their_own_conditional_have_no_observed_descendant(name, method):
    schedule = schedule_of(name, method)
    unrolled, site_of = schedule.graph.unroll(), sites_by_variable(schedule)
    for variable in unrolled:
        if site_of[variable] in schedule.prior_latents:
            descendants = nx.descendants(unrolled, variable)
            assert not any(unrolled.nodes[other]["observed"] for other in descendants)


def test_latents_from_their_own_conditional_are_found():
    assert schedule_of("masks_and_counts", "faithful").prior_latents == {"y_unobserved"}


@all_cases
def test_last_reads_are_those_of_contexts_and_densities(name, method):
    schedule = schedule_of(name, method)
    contexts = [{site for f in stage for site in f.context} for stage in schedule.stages]
    readers = {site: [-1] for site in schedule.graph.latent}
    for number, (context, closing) in enumerate(zip(contexts, schedule.closing, strict=True)):
        edges = schedule.graph.edges
        scored = {*closing, *(edge.parent for edge in edges if edge.child in closing)}
        for site in (context | scored) & set(readers):
            readers[site].append(number)
    assert schedule.last_reads(contexts) == {site: max(r) for site, r in readers.items()}


def trees():
    """Cases that divide and conquer applies to."""
    return [
        (name, method)
        for name in ("pumps", "eight_schools", "nested", "pumps_loop_then_plate")
        for method in ("blanket", "faithful")
        if divisible(schedule_of(name, method).inverse)
    ]


@pytest.mark.parametrize(("name", "method"), trees())
def test_merging_counts_each_density_once_within_the_plates_of_its_stage(name, method):
    schedule = schedule_of(name, method)
    graph, factors = schedule.graph, schedule.inverse.factors

    def can_count(stage, site):
        sampled = schedule.closing_stage[site] <= stage
        return sampled and set(factors[stage].plates) <= set(graph.sites[site].plates)

    for site in schedule.counted:
        stages = [n for n, sites in enumerate(schedule.merging) if site in sites]
        possible = [n for n in range(len(factors)) if can_count(n, site)]
        assert stages == [min(possible, default=len(factors))]


def model_with_a_joint_leaf(n=3):
    """Of the joint leaf (a, b), the prior of a depends on nothing, that of b on mu."""
    numpyro.sample("covariate", dist.Normal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", n):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a + b, 0.5))


def test_a_marginal_is_kept_until_all_priors_of_its_factor_are_counted():
    graph = rd.trace(model_with_a_joint_leaf, ["y", "covariate"])
    inverse = rd.invert(graph, "blanket")
    schedule = DensitySchedule(inverse)
    leaf, root = inverse.factors
    assert (leaf.latents, leaf.plates) == (("a", "b"), ("n",))
    assert (root.latents, root.plates) == (("mu",), ())
    assert schedule.merging == (("a", "y"), ("covariate", "mu", "b"), ())
    assert schedule.marginal_stages == {0: 1}
    assert needing_marginals(inverse) == [leaf]


def test_no_marginal_where_priors_are_counted_at_once():
    graph = rd.trace(CASES["pumps"].model, CASES["pumps"].observed)
    inverse = rd.invert(graph, "faithful")
    assert DensitySchedule(inverse).marginal_stages == {}
    assert needing_marginals(inverse) == []
