"""Progress lines on standard error."""

import numpyro
import numpyro.distributions as dist

import retrodict as rd
from zoo import key


def model():
    """A normal mean with four observations."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.StudentT(3.0, mu, 1.0))


def compile_model(show):
    estimator = rd.MADE(hidden=(8,), components=2, context=(8,))
    training = rd.Training(max_steps=4, dataset_size=256, heldout_size=64)
    return rd.compile(
        key(), model, ["y"], estimator=estimator, training=training, progress_bar=show
    )


def test_every_phase_has_a_line(capsys):
    compile_model(True)
    lines = capsys.readouterr().err
    phases = [
        "tracing and inverting the model",
        "recognising conditionals",
        "mu (1/1)",
        "comparing inference methods",
    ]
    positions = [lines.find(phase) for phase in phases]
    assert -1 not in positions and positions == sorted(positions)


def test_without_progress_bar_nothing_is_printed(capsys):
    compile_model(False)
    assert capsys.readouterr().err == ""
