"""A compiled model, saved and loaded again: bit for bit the same, or refused with the reason."""

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
from retrodict import artefact
from retrodict.estimators.encoders import Embedding
from retrodict.inference.methods import Inference, Plan

SMALL = rd.MADE((8, 8), 2, (8,), Embedding((8,), (8,), 8, 1))
SHORT = rd.Training(max_steps=8, batch_size=16, dataset_size=128, heldout_size=32)
OURS = (rd.DamagedFile, rd.NewerFormat, rd.WrongModel)


def compile_(model, observed, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        # Choosing a method takes longer than all else here.
        patch.setattr(Inference, "plan", lambda *_: Plan("importance", {"importance": 7.5}, 10, 2))
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
    """Elements differ by a constant; options make models that are nearly the same."""
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
def saved(compiled, tmp_path_factory):
    return compiled.save(tmp_path_factory.mktemp("saved") / "schools.rd")


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_saved_model_gives_the_same_answers_bit_for_bit(compiled, saved):
    loaded = rd.load(saved, schools)
    samples, log_q = compiled.propose(zoo.key(1), DATA, 50)
    assert_same(loaded.propose(zoo.key(1), DATA, 50), (samples, log_q))
    assert_same(loaded.log_prob(samples, DATA), compiled.log_prob(samples, DATA))
    one, other = (c.infer(zoo.key(2), DATA, 100, rescue=False) for c in (compiled, loaded))
    assert_same(other.samples, one.samples)
    assert_same(other.log_weights, one.log_weights)
    assert other.log_evidence == one.log_evidence
    assert loaded.history == compiled.history
    assert loaded.plan == compiled.plan
    assert loaded.estimator == compiled.estimator
    assert loaded.inverse.method == compiled.inverse.method


def test_a_loaded_model_can_be_trained_and_saved_again(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(Inference, "plan", lambda *_: Plan("importance"))
    loaded = rd.load(saved, schools)
    further = loaded.train(zoo.key(4), SHORT, progress_bar=False)
    again = rd.load(further.save(tmp_path / "further.rd"), schools)
    assert_same(again.networks, further.networks)
    assert [h.steps[-1] for h in again.history.networks.values()] == [16, 16]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
t = __import__(sys.argv[3])
answer = t.rd.load(sys.argv[2], t.schools).infer(t.zoo.key(2), t.DATA, 200, rescue=False)
print(repr(float(answer.log_evidence)), answer.samples["theta"].tobytes().hex()[:400])
"""


@pytest.mark.slow
def test_another_process_gives_the_same_answers(compiled, saved):
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(saved), __name__]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    answer = compiled.infer(zoo.key(2), DATA, 200, rescue=False)
    assert told[0] == repr(float(answer.log_evidence))
    assert told[1] == answer.samples["theta"].tobytes().hex()[:400]


def refused(path, model=schools):
    with pytest.raises(OURS) as caught:
        rd.load(path, model)
    return caught


def test_a_truncated_file_is_refused_wherever_it_ends(saved, tmp_path):
    whole = saved.read_bytes()
    assert len(whole) > 10_000
    path = tmp_path / "cut.rd"
    for length in {*range(0, len(whole), 1000), 1, 207, 208, len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert refused(path).type is rd.DamagedFile


def test_a_flipped_bit_is_refused_wherever_it_is(saved, tmp_path):
    whole = saved.read_bytes()
    path = tmp_path / "flipped.rd"
    rng = np.random.default_rng(0)
    for place in rng.integers(8 * len(whole), size=200):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        # A flip in the version may only be taken for what it is: the label has its own checksum.
        assert refused(path).type is rd.DamagedFile


def test_a_newer_version_is_refused_as_such(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(artefact, "FORMAT", artefact.FORMAT + 1)
    path = compiled.save(tmp_path / "newer.rd")
    monkeypatch.undo()
    assert refused(path).type is rd.NewerFormat


def test_a_file_of_ours_that_holds_no_model_is_refused(tmp_path):
    path = artefact.write(tmp_path / "other.rd", {"graph": {}}, {})
    assert "does not hold a compiled model" in str(refused(path).value)


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
def test_another_model_is_refused_and_the_difference_named(saved, model, message):
    with pytest.raises(rd.WrongModel, match=message):
        rd.load(saved, model)


def test_another_precision_is_refused(saved):
    with jax.enable_x64(True), pytest.raises(rd.DamagedFile, match="jax_enable_x64"):
        rd.load(saved, schools)


def test_a_crash_while_saving_leaves_the_old_file(compiled, saved, tmp_path, monkeypatch):
    path = tmp_path / "model.rd"
    path.write_bytes(saved.read_bytes())

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(artefact.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        compiled.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == saved.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def everything(numbers, names, flag, nothing, options, *, spread):
    """Arguments of every kind that can be saved."""
    assert names == ["a", "b"] and flag is True and nothing is None
    assert isinstance(numbers, jax.Array) and isinstance(spread, np.float32)
    assert isinstance(options["sizes"], tuple) and options["limit"] == float("inf")
    mean = numbers.at[0].set(0.0).sum() + options["array"].sum()

    def step(x, _):
        x = numpyro.sample("x", dist.Normal(x + mean, spread))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, None, length=options["sizes"][0])


def test_arguments_of_every_kind_come_back(tmp_path):
    options = {"sizes": (3, 4), "limit": float("inf"), "array": np.arange(3, dtype=np.int8)}
    args = (jnp.arange(3.0), ["a", "b"], True, None, options)
    compiled = compile_(
        everything, ("y",), model_args=args, model_kwargs={"spread": np.float32(2.0)}
    )
    loaded = rd.load(compiled.save(tmp_path / "args.rd"), everything)
    found, expected = (c.graph.program.args for c in (loaded, compiled))
    assert_same(found, expected)
    assert found[4]["array"].dtype == np.int8
    data = {"y": np.zeros(3, np.float32)}
    answers = [c.propose(zoo.key(1), data, 10) for c in (compiled, loaded)]
    assert_same(answers[1], answers[0])


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
    before = dict(program.kwargs)
    program.kwargs["extra"] = value
    try:
        with pytest.raises(TypeError, match=message):
            compiled.save(tmp_path / "no.rd")
    finally:
        program.kwargs.clear()
        program.kwargs.update(before)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_can_be_bound_to_the_model(tmp_path):
    bound = partial(schools, noise=dist.Laplace)
    compiled = compile_(bound, ("y",), model_args=(SIGMA,))
    loaded = rd.load(compiled.save(tmp_path / "bound.rd"), bound)
    assert_same(loaded.networks, compiled.networks)


def test_weights_of_another_size_are_refused(compiled, saved, tmp_path):
    header, arrays = artefact.read(saved)
    header = {k: v for k, v in header.items() if k not in ("format", "versions")}
    header["estimator"]["hidden"] = [16, 16]
    path = artefact.write(tmp_path / "other.rd", header, arrays)
    assert "compile again" in str(refused(path).value)
