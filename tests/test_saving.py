"""Saving and loading compiled models: exact round trips, and refusal of wrong files and models."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import retrodict as rd
import zoo
from oracles import without_planning
from retrodict import artefact
from retrodict.estimators.encoders import Embedding
from retrodict.inference.planning import Plan

SMALL = rd.MADE((8, 8), 2, (8,), Embedding((8,), (8,), 8, 1))
SHORT = rd.Training(max_steps=8, batch_size=16, dataset_size=128, heldout_size=32)
LOAD_ERRORS = (rd.DamagedFile, rd.NewerFormat, rd.OlderFormat, rd.WrongModel)


def compile_(model, observed, **kwargs):
    with without_planning(Plan("importance", {"importance": 7.5}, 10, 2)):
        return rd.compile(
            zoo.key(0),
            model,
            observed,
            estimator=SMALL,
            training=SHORT,
            progress_bar=False,
            **kwargs,
        )


def schools(sigma, scale=5.0, y=None, *, names=("mu", "theta"), noise=dist.Normal, link=True):
    """Eight schools, with options that change one part of the model each."""
    mu = numpyro.sample(names[0], dist.Normal(0, scale))
    with numpyro.plate("schools", len(sigma)):
        theta = numpyro.sample(names[1], dist.Normal(mu if link else 0.0, 3))
        numpyro.sample("y", noise(loc=theta, scale=sigma), obs=y)


SIGMA = np.array([15.0, 10.0, 16.0], np.float32)
DATA = {"y": np.array([28.0, 8.0, -3.0], np.float32)}


@pytest.fixture(scope="module")
def compiled():
    return compile_(schools, ("y",), model_args=(SIGMA,), model_kwargs={"scale": 4.0})


@pytest.fixture(scope="module")
def schools_file(compiled, tmp_path_factory):
    return compiled.save(tmp_path_factory.mktemp("saved") / "schools.rd")


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_loaded_model_gives_the_same_results_bit_for_bit(compiled, schools_file):
    loaded = rd.load(schools_file, schools)
    samples, log_q = compiled.propose(zoo.key(1), DATA, 50)
    assert_equal(loaded.propose(zoo.key(1), DATA, 50), (samples, log_q))
    assert_equal(loaded.log_prob(samples, DATA), compiled.log_prob(samples, DATA))
    expected, actual = (c.infer(zoo.key(2), DATA, 100, rescue=False) for c in (compiled, loaded))
    assert_equal(actual.samples, expected.samples)
    assert_equal(actual.log_weights, expected.log_weights)
    assert actual.log_evidence == expected.log_evidence
    assert loaded.history == compiled.history
    assert loaded.plan == compiled.plan
    assert loaded.estimator == compiled.estimator
    assert loaded.inverse.method == compiled.inverse.method


def test_loaded_model_can_be_trained_and_saved_again(schools_file, tmp_path, without_planning):
    loaded = rd.load(schools_file, schools)
    trained = loaded.train(zoo.key(4), SHORT, progress_bar=False)
    reloaded = rd.load(trained.save(tmp_path / "trained.rd"), schools)
    assert_equal(reloaded.networks, trained.networks)
    assert [h.steps[-1] for h in reloaded.history.networks.values()] == [16, 16]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
t = __import__(sys.argv[3])
posterior = t.rd.load(sys.argv[2], t.schools).infer(t.zoo.key(2), t.DATA, 200, rescue=False)
print(repr(float(posterior.log_evidence)), posterior.samples["theta"].tobytes().hex()[:400])
"""


@pytest.mark.slow
def test_another_process_gives_the_same_results(compiled, schools_file):
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(Path(__file__).parent),
        str(schools_file),
        __name__,
    ]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    log_evidence, theta = process.stdout.split()
    posterior = compiled.infer(zoo.key(2), DATA, 200, rescue=False)
    assert log_evidence == repr(float(posterior.log_evidence))
    assert theta == posterior.samples["theta"].tobytes().hex()[:400]


def load_error(path, model=schools):
    with pytest.raises(LOAD_ERRORS) as caught:
        rd.load(path, model)
    return caught


def test_truncated_file_is_refused(schools_file, tmp_path):
    data = schools_file.read_bytes()
    assert len(data) > 10_000
    path = tmp_path / "truncated.rd"
    for length in {*range(0, len(data), 1000), 1, 127, 128, len(data) - 1}:
        path.write_bytes(data[:length])
        assert load_error(path).type is rd.DamagedFile


def test_file_with_a_flipped_bit_is_refused(schools_file, tmp_path):
    data = schools_file.read_bytes()
    path = tmp_path / "flipped.rd"
    rng = np.random.default_rng(0)
    for bit in rng.integers(8 * len(data), size=200):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        # A flip in the version bytes is not mistaken for a newer format.
        assert load_error(path).type is rd.DamagedFile


@pytest.mark.parametrize(
    ("shift", "error", "message"),
    [(1, rd.NewerFormat, "newer format: install"), (-1, rd.OlderFormat, "older format: compile")],
)
def test_file_of_another_format_is_refused(compiled, tmp_path, monkeypatch, shift, error, message):
    monkeypatch.setattr(artefact, "FORMAT", artefact.FORMAT + shift)
    path = compiled.save(tmp_path / "other.rd")
    monkeypatch.undo()
    caught = load_error(path)
    assert caught.type is error
    assert message in str(caught.value)


def test_artefact_without_a_compiled_model_is_refused(tmp_path):
    path = artefact.write(tmp_path / "other.rd", {"graph": {}}, {})
    assert "does not hold a compiled model" in str(load_error(path).value)


def vector(sigma, scale=5.0, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, scale).expand([2]).to_event(1))
    with numpyro.plate("schools", len(sigma)):
        theta = numpyro.sample("theta", dist.Normal(mu.sum(), 3))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def without_arguments():
    numpyro.sample("mu", dist.Normal(0, 1))


def fails(sigma, scale):
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(schools, names=("mu", "phi")), r"sites mu, theta, y; this model has mu, phi"),
        (vector, r"shape of site 'mu' was \[\], in this model it is \[2\]"),
        (partial(schools, noise=dist.Laplace), r"distribution of site 'y' was Normal.*Laplace"),
        (partial(schools, link=False), r"the dependence of 'theta' on 'mu' differs"),
        (without_arguments, r"cannot be called with the arguments in the file"),
        (fails, r"cannot be called with the arguments in the file.*not today"),
    ],
)
def test_another_model_is_refused_and_the_difference_named(schools_file, model, message):
    with pytest.raises(rd.WrongModel, match=message):
        rd.load(schools_file, model)


def test_another_floating_point_precision_is_refused(schools_file):
    with jax.enable_x64(True), pytest.raises(rd.DamagedFile, match="jax_enable_x64"):
        rd.load(schools_file, schools)


def test_interrupted_save_leaves_the_old_file(compiled, schools_file, tmp_path, monkeypatch):
    path = tmp_path / "model.rd"
    path.write_bytes(schools_file.read_bytes())

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(artefact.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        compiled.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == schools_file.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def model_with_arguments_of_every_type(numbers, names, flag, nothing, options, *, spread):
    assert names == ["a", "b"] and flag is True and nothing is None
    assert isinstance(numbers, jax.Array) and isinstance(spread, np.float32)
    assert isinstance(options["sizes"], tuple) and options["limit"] == float("inf")
    mean = numbers.at[0].set(0.0).sum() + options["array"].sum()

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x + mean, spread))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, None, length=options["sizes"][0])


def test_arguments_of_every_type_round_trip(tmp_path):
    options = {"sizes": (3, 4), "limit": float("inf"), "array": np.arange(3, dtype=np.int8)}
    args = (jnp.arange(3.0), ["a", "b"], True, None, options)
    model = model_with_arguments_of_every_type
    compiled = compile_(model, ("y",), model_args=args, model_kwargs={"spread": np.float32(2.0)})
    loaded = rd.load(compiled.save(tmp_path / "args.rd"), model)
    loaded_args = loaded.graph.program.args
    assert_equal(loaded_args, compiled.graph.program.args)
    assert loaded_args[4]["array"].dtype == np.int8
    data = {"y": np.zeros(3, np.float32)}
    expected, actual = (c.propose(zoo.key(1), data, 10) for c in (compiled, loaded))
    assert_equal(actual, expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, r"model_kwargs\.extra: expected numbers.*found function.*functools.partial"),
        ({1: 2.0}, r"model_kwargs\.extra: .*found dict"),
        ([1, {"a": {2}}], r"model_kwargs\.extra\[1\]\.a: .*found set"),
        (jax.random.key(0), r"model_kwargs\.extra: it is a random key"),
    ],
)
def test_arguments_that_cannot_be_saved_are_named(value, message, compiled, tmp_path):
    program = compiled.graph.program
    original = dict(program.kwargs)
    program.kwargs["extra"] = value
    try:
        with pytest.raises(TypeError, match=message):
            compiled.save(tmp_path / "no.rd")
    finally:
        program.kwargs.clear()
        program.kwargs.update(original)
    assert not list(tmp_path.iterdir())


def test_argument_bound_by_partial_need_not_be_saved(tmp_path):
    bound = partial(schools, noise=dist.Laplace)
    compiled = compile_(bound, ("y",), model_args=(SIGMA,))
    loaded = rd.load(compiled.save(tmp_path / "bound.rd"), bound)
    assert_equal(loaded.networks, compiled.networks)


def test_weights_of_another_shape_are_refused(compiled, schools_file, tmp_path):
    header, arrays = artefact.read(schools_file)
    header["estimator"]["hidden"] = [16, 16]
    path = artefact.write(tmp_path / "other.rd", header, arrays)
    assert "compile again" in str(load_error(path).value)
