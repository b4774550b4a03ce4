"""Training: schedule, interruption, resuming, determinism, dropped draws and messages."""

import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import retrodict as rd
import zoo
from oracles import slow_if
from retrodict import compiled as compiled_module
from retrodict.estimators.conditional import MADE, ConditionalMADE, trainable
from retrodict.estimators.encoders import Embedding
from retrodict.graph.prior_draws import prior_sampler
from retrodict.training import gradient_steps, schedule, train
from retrodict.training.prefetch import Prefetcher
from retrodict.training.progress import Interruption
from retrodict.training.schedule import SetSizes, Training
from retrodict.training.simulate import Simulator
from retrodict.training.train import train_network

SMALL = MADE((16, 16), 3, (16,), Embedding((16,), (16,), 16, 1))
SHORT = Training(max_steps=64, batch_size=32, dataset_size=512, heldout_size=256, passes=2)


pytestmark = pytest.mark.usefixtures("without_planning")


def pair(y=None):
    """Two networks: one for the latent outside of the plate, one shared along the plate."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("n", 3):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


DATA = {"y": np.array([0.3, -1.0, 2.0])}


def compile_(model=pair, observed=("y",), training=SHORT, seed=0, **kwargs):
    return rd.compile(
        zoo.key(seed),
        model,
        observed,
        estimator=SMALL,
        training=training,
        progress_bar=False,
        **kwargs,
    )


def gain_over_prior(compiled, number=2000):
    """Mean of log q(x | y) - log p(x) over new draws, and its standard error."""
    graph = compiled.proposal.graph
    program, latent = graph.program, graph.latent

    def one(key):
        values = program.simulate(key)
        density = program.log_density(values)
        prior = sum(density[name].sum() for name in latent)
        return compiled.proposal.log_prob(compiled.networks, values) - prior

    gains = jax.jit(jax.vmap(one))(jax.random.split(zoo.key(99), number))
    return float(gains.mean()), float(gains.std() / np.sqrt(number))


def loop():
    """A hidden Markov chain as a Python loop over numbered sites."""
    x = 0.0
    for t in range(3):
        x = numpyro.sample(f"x_{t}", dist.Normal(0.5 * x, 1))
        numpyro.sample(f"y_{t}", dist.Normal(x, 1))


def chain():
    def step(x, _):
        x = numpyro.sample("x", dist.Normal(0.5 * x, 1))
        numpyro.sample("y", dist.Normal(x, 1))
        return x, None

    scan(step, 0.0, None, length=4)


MODELS = {
    "plate": (zoo.regression, ("z", "t")),
    "discrete": (zoo.discrete_network, ("xray", "dyspnoea")),
    "scan": (chain, ("y",)),
    "loop": (loop, ("y_0", "y_1", "y_2")),
    "mixture": (zoo.mixture_collapsed, ("y",)),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=slow_if(k != "scan")) for k in MODELS],
)
def test_trained_networks_are_better_than_the_prior(kind):
    training = Training(max_steps=300, batch_size=64, dataset_size=4096, heldout_size=512)
    compiled = compile_(*MODELS[kind], training)
    gain, error = gain_over_prior(compiled)
    assert gain > 4 * error
    for history in compiled.history.networks.values():
        assert np.all(np.isfinite(history.loss))
        assert history.best_loss < history.loss[0]
        assert history.steps[-1] == 300 and history.stopped == "limit reached"


def test_held_out_loss_is_in_nats():
    compiled = compile_(training=Training(max_steps=500, batch_size=64, dataset_size=4096))
    mu, z = (compiled.history.networks[n] for n in compiled.networks)
    # z | mu, y is normal with precision 1 + 4; mu | y with precision 1 + 3 / (1 + 1/4).
    for history, precision in ((mu, 1 + 3 / 1.25), (z, 5.0)):
        entropy = 0.5 * np.log(2 * np.pi * np.e / precision)
        # The mean over 4096 examples has standard error 0.7 / 64; the entropy is the lowest loss.
        assert entropy - 0.05 < history.best_loss < entropy + 0.15


class FakeTraining:
    """Each pass adds one to all weights, and losses come from a list, whose last is repeated."""

    def __init__(self, monkeypatch, losses):
        self.losses, self.rates = iter(losses), []
        self.last = None
        monkeypatch.setattr(train, "one_pass", self.one_pass)
        monkeypatch.setattr(train, "heldout_loss", self.heldout_loss)

    def one_pass(self, key, state, examples, fixed, settings, clip):
        self.rates.append(np.asarray(settings.learning_rate))
        weights = jax.tree.map(lambda leaf: leaf + 1, state.weights)
        return state._replace(weights=weights, average=weights)

    def heldout_loss(self, *_):
        self.last = next(self.losses, self.last)
        return self.last


def network_and_simulator(model=pair, observed=("y",)):
    """The first network of a model, untrained, and its simulator."""
    graph = rd.trace(model, observed)
    proposal = compiled_module.Proposal.of(rd.invert(graph, "auto"))
    structures = next(iter(proposal.networks().values()))
    network = proposal.build(SMALL, zoo.key(0), structures)
    simulator = Simulator(graph, tuple(structures), proposal.covariates, 4, prior_sampler(graph))
    return network, simulator


def run_fake(monkeypatch, losses, **options):
    """The fake, the history, and the number of passes that the returned weights went through."""
    fake = FakeTraining(monkeypatch, losses)
    network, simulator = network_and_simulator()
    training = Training(**({"batch_size": 32, "dataset_size": 128, "heldout_size": 64} | options))
    trained, history = train_network(zoo.key(0), network, simulator, training)
    final = jax.tree.leaves(eqx.filter(trained, trainable(trained)))[0]
    initial = jax.tree.leaves(eqx.filter(network, trainable(network)))[0]
    return fake, history, int(np.round(np.mean(final - initial)))


def test_new_sets_are_simulated_after_the_given_number_of_passes(monkeypatch):
    # Losses: an initial one, one for each pass, and two for each refresh, of best and last weights.
    falling = iter(np.arange(100.0, 0, -1))
    _, history, _ = run_fake(monkeypatch, falling, passes=3, max_steps=40)
    assert history.refreshes == [12, 24, 36]  # four steps in a pass; no refresh after the last
    assert history.stopped == "limit reached"


def test_new_sets_are_simulated_when_the_held_out_loss_rises(monkeypatch):
    losses = [9.0, 8.0, 8.5, 8.0, 8.5, 7.0, 6.0, 6.1, 6.0, 6.1, 6.0]
    _, history, _ = run_fake(monkeypatch, losses, passes=1000, max_steps=20)
    # The loss rises in pass 2, falls in passes 3 and 4, and rises in pass 5.
    assert history.refreshes == [8]
    assert history.loss == [9.0, 8.0, 8.5, 7.0, 6.0, 6.1]


def test_the_best_weights_are_kept(monkeypatch):
    losses = [9.0, 8.0, 7.0, 7.5, 7.0, 7.5, 7.6, 7.0, 7.6]
    _, history, passes = run_fake(monkeypatch, losses, passes=1000, max_steps=16)
    assert history.loss == [9.0, 8.0, 7.0, 7.5, 7.6]
    assert passes == 2 and history.best_loss == 7.0


def test_the_learning_rate_is_halved_on_plateaus_until_training_stops(monkeypatch):
    fake, history, passes = run_fake(
        monkeypatch, [5.0], patience=3, halvings=2, max_steps=100_000, learning_rate=0.1
    )
    assert history.stopped == "held-out loss no longer falls"
    assert len(fake.rates) == 9 and passes == 0
    # All steps are within the warm-up.
    warm_up = np.minimum((np.arange(36) + 1) / schedule.WARM_UP, 1) * (1 - np.arange(36) / 100_000)
    halved = 0.1 * 0.5 ** (np.arange(36) // 12)
    np.testing.assert_allclose(np.concatenate(fake.rates), halved * warm_up, rtol=1e-4)


def test_the_learning_rate_falls_to_zero_at_the_limit(monkeypatch):
    fake, history, _ = run_fake(monkeypatch, np.arange(2000.0, 0, -1), max_steps=402)
    rates = np.concatenate(fake.rates)
    assert history.steps[-1] == 402 and np.all(rates[402:] == 0)
    assert rates.argmax() == 99
    np.testing.assert_allclose(np.diff(rates[99:402]), -3e-3 / 402, rtol=1e-2)


def test_training_restarts_from_the_best_weights_after_a_nonfinite_loss(monkeypatch):
    losses = [9.0, 8.0, np.nan, 8.0, 8.0, 7.0]
    _, history, passes = run_fake(monkeypatch, losses, passes=1000, max_steps=12)
    # The second of three passes is discarded.
    assert passes == 2 and history.best_loss == 7.0


def test_a_batch_with_a_nonfinite_gradient_is_skipped():
    network, simulator = network_and_simulator()
    weights, fixed = eqx.partition(network, trainable(network))
    state = gradient_steps.TrainingState.initial(weights, 5.0)
    settings = schedule.StepSettings(jnp.full(1, 0.1), jnp.zeros(1))
    examples, _ = simulator.examples(zoo.key(0), 2, lambda: False)
    (label,) = examples.latents
    with_nan = examples._replace(latents={label: jnp.array([0.1, jnp.nan])})
    same = train.one_pass(zoo.key(0), state, with_nan, fixed, settings, 5.0)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    other = train.one_pass(zoo.key(0), state, examples, fixed, settings, 5.0)
    changes = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), other.weights, weights)
    assert max(jax.tree.leaves(changes)) == pytest.approx(0.1, rel=1e-3)  # Adam's first step


@pytest.mark.slow
def test_training_overfits_one_fixed_set_but_not_new_ones(monkeypatch):
    options = {"batch_size": 32, "dataset_size": 64, "heldout_size": 512, "learning_rate": 1e-2}
    training = Training(max_steps=600, passes=10**6, patience=10**6, **options)
    network, simulator = network_and_simulator()
    _, history = train_network(zoo.key(1), network, simulator, training)
    assert len(history.refreshes) > 20  # because the held-out loss rose

    sets = []
    original = Prefetcher.next

    def first_set(self):
        sets.append(sets[0] if sets else original(self))
        return sets[-1]

    monkeypatch.setattr(Prefetcher, "next", first_set)
    _, history_of_fixed = train_network(zoo.key(1), network, simulator, training)
    assert history_of_fixed.loss[-1] > history_of_fixed.best_loss + 0.5
    # Held-out losses are means over 512 examples, with standard error 0.03.
    assert history.loss[-1] < history_of_fixed.loss[-1] - 0.5
    assert history.best_loss < history_of_fixed.best_loss


def check_inference(compiled):
    posterior = compiled.infer(zoo.key(3), DATA, 500, method="importance")
    assert np.isfinite(posterior.log_evidence)
    assert posterior.ess > 5


def send_sigint(*_):
    signal.raise_signal(signal.SIGINT)


def raise_interrupt(*_):
    raise KeyboardInterrupt


def act_at_call(number, function, act):
    """The function, wrapped so that `act` runs before its call of this number."""
    calls = 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return function(*args, **kwargs)

    return wrapper


PLACES = {
    "first simulation": (Simulator, "examples", 1),
    "next set, in the thread": (Simulator, "examples", 2),
    "first pass": (train, "one_pass", 1),
    "evaluation after a refresh": (train, "heldout_loss", 7),
    "report": (compiled_module.Progress, "__call__", 2),
    "fitting of scalings": (ConditionalMADE, "fit_scalings", 1),
    "between networks": (compiled_module.Progress, "__init__", 2),
    "second network": (train, "one_pass", 6),
}


# The same as other places, but in the second network.
SECOND_NETWORK = ("between networks", "second network")


# KeyboardInterrupt is raised where the program has its own signal handler, or in the thread.
@pytest.mark.parametrize(
    ("place", "act"),
    [
        pytest.param(place, send_sigint, marks=slow_if(place in SECOND_NETWORK))
        for place in PLACES
        if "thread" not in place
    ]
    + [
        pytest.param("first simulation", raise_interrupt, marks=pytest.mark.slow),
        ("next set, in the thread", raise_interrupt),
    ],
)
def test_an_interruption_anywhere_keeps_the_best_weights(monkeypatch, place, act):
    owner, name, number = PLACES[place]
    monkeypatch.setattr(owner, name, act_at_call(number, getattr(owner, name), act))
    with pytest.warns(UserWarning, match="interrupted"):
        compiled = compile_()
    stopped = [h.stopped for h in compiled.history.networks.values()]
    assert stopped[-1] == "interrupted"
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(compiled.networks))
    assert not any(thread.name.startswith("ThreadPool") for thread in threading.enumerate())
    if place in ("first simulation", "between networks", "next set, in the thread"):
        check_inference(compiled)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Networks whose training had not begun have scalings as well.
    for network in compiled.networks.values():
        assert not np.all(network.scaling.scale == 1)
    monkeypatch.undo()
    if place == "first simulation":
        resumed = compiled.train(zoo.key(5), SHORT, progress_bar=False)
        assert all(h.stopped == "limit reached" for h in resumed.history.networks.values())


def test_a_second_interruption_raises_keyboard_interrupt(monkeypatch):
    def twice():
        send_sigint()
        send_sigint()

    monkeypatch.setattr(train, "one_pass", act_at_call(2, train.one_pass, twice))
    with pytest.raises(KeyboardInterrupt):
        compile_()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_signal_handler_is_installed_outside_of_the_main_thread():
    in_worker = []
    with Interruption() as outer:
        handler = signal.getsignal(signal.SIGINT)
        worker = threading.Thread(target=lambda: in_worker.append(Interruption().__enter__()))
        worker.start()
        worker.join()
        assert signal.getsignal(signal.SIGINT) is handler
        send_sigint()
        assert outer.requested and not in_worker[0].requested


def test_an_error_in_simulation_is_raised(monkeypatch):
    def fail():
        raise OverflowError("out of numbers")

    monkeypatch.setattr(Simulator, "examples", act_at_call(2, Simulator.examples, fail))
    with pytest.raises(OverflowError, match="out of numbers"):
        compile_(training=Training(max_steps=1000, batch_size=32, dataset_size=128, passes=1))


def test_training_continues_where_it_stopped():
    longer = Training(max_steps=400, batch_size=64, dataset_size=2048, heldout_size=2048)
    half = Training(max_steps=200, batch_size=64, dataset_size=2048, heldout_size=2048)
    uninterrupted, first = compile_(training=longer), compile_(training=half)
    before = {name: list(h.loss) for name, h in first.history.networks.items()}
    resumed = first.train(zoo.key(7), half, progress_bar=False)
    assert {name: h.loss for name, h in first.history.networks.items()} == before
    for name, history in resumed.history.networks.items():
        assert history.steps[-1] == 400
        assert history.loss[: len(before[name])] == before[name]
        assert history.rejected.simulated > first.history.networks[name].rejected.simulated
        assert history.seconds > first.history.networks[name].seconds
    gains = (gain_over_prior(model) for model in (uninterrupted, resumed, first))
    (longer_gain, error), (resumed_gain, _), (first_gain, _) = gains
    assert resumed_gain > first_gain - error
    # Both were trained on as many examples; two trainings differ by a few hundredths.
    assert resumed_gain == pytest.approx(longer_gain, abs=0.15)


SCRIPT = """
import hashlib, sys
sys.path[:0] = sys.argv[1].split()
import jax, numpy as np
from oracles import without_planning
t = __import__(sys.argv[3])
training = t.Training(max_steps=150, batch_size=64, dataset_size=1024, passes=2)
estimator = t.MADE((64, 64), 5)
with without_planning():
    compiled = t.rd.compile(t.zoo.key(int(sys.argv[2])), t.pair, ("y",), estimator=estimator,
                            training=training, progress_bar=False)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(compiled.networks):
    digest.update(np.asarray(leaf).tobytes())
print(digest.hexdigest(), [h.loss for h in compiled.history.networks.values()])
"""


@pytest.mark.slow
def test_the_key_determines_the_weights_bit_for_bit_across_processes():
    def train_in_new_process(seed):
        here = Path(__file__).parent
        paths = f"{here} {here.parent}"
        command = [sys.executable, "-c", SCRIPT, paths, str(seed), __name__]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    output = train_in_new_process(0)
    assert output.startswith(tuple("0123456789abcdef")) and "[[" in output
    assert output == train_in_new_process(0)
    assert output != train_in_new_process(1)


def test_a_model_with_heavy_tails_is_trained_and_dropped_draws_are_reported(capfd):
    training = Training(max_steps=200, batch_size=64, dataset_size=2048, heldout_size=512)
    message = r"(18|19|20)% of the draws from the prior were dropped.*'y'"
    with pytest.warns(UserWarning, match=message):
        compiled = rd.compile(
            zoo.key(0),
            zoo.pumps,
            ("t", "y"),
            inverse="faithful",
            model_kwargs={"n": 3},
            estimator=SMALL,
            training=training,
        )
    for history in compiled.history.networks.values():
        assert np.all(np.isfinite(history.loss))
        assert history.best_loss < history.loss[0] - 1
    assert compiled.history.rejected["y", "integer overflow"] > 0
    assert compiled.history.simulated > 2048
    progress = capfd.readouterr().err
    for words in ("alpha, beta (1/2)", "theta (2/2)", "step 200", "held-out loss", "nats"):
        assert words in progress
    for words in ("refreshes", "% of draws dropped", "limit reached", "100%", "simulating"):
        assert words in progress


def test_few_dropped_draws_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_()


def test_the_time_limit_holds_for_all_networks_together(monkeypatch):
    original, limits = compiled_module.train_network, []

    def record_limit(*args, max_seconds, **options):
        limits.append(max_seconds)
        return original(*args, max_seconds=max_seconds, **options)

    monkeypatch.setattr(compiled_module, "train_network", record_limit)
    compiled = compile_(training=Training(max_steps=10**9, max_seconds=0.5, patience=10**6))
    # The first of two networks has half of the time, the second what is left.
    assert 0 < limits[0] <= 0.25 and limits[1] <= 0.5
    for history in compiled.history.networks.values():
        assert history.stopped == "limit reached"
        assert history.steps[-1] < 10**6


def test_training_without_a_progress_bar_prints_nothing(capfd):
    compile_()
    output = capfd.readouterr()
    assert output.out == "" and output.err == ""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size=0\): must be at least 1"),
        ({"max_steps": -1}, ValueError, r"max_steps=-1\): must be at least 0"),
        ({"max_steps": 1e4}, TypeError, r"max_steps=10000.0\): must be a whole number"),
        ({"learning_rate": 0.0}, ValueError, r"learning_rate=0.0\): must be greater than 0"),
        ({"max_seconds": -3}, ValueError, r"max_seconds=-3\): must be greater than 0"),
        ({"clip": float("nan")}, ValueError, r"clip=nan\): must be greater than 0"),
        ({"halvings": -1}, ValueError, r"halvings=-1\): must be at least 0"),
    ],
)
def test_invalid_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Training(**options)


def test_sets_and_batches_are_made_smaller_to_fit_into_memory():
    assert SetSizes.of(Training(), 100) == SetSizes(256, 128, 4096)
    for example_bytes in (10**4, 10**6, 10**8, 10**10):
        sizes = SetSizes.of(Training(), example_bytes)
        total = sizes.training + sizes.heldout
        assert total * example_bytes <= max(Training().memory, 2 * example_bytes)
        assert min(sizes) >= 1
        assert sizes.heldout % min(sizes.batch, sizes.heldout) == 0
    assert SetSizes.of(Training(), 10**6).batch == 8


def test_no_more_examples_are_simulated_than_the_steps_can_use():
    assert SetSizes.of(Training(max_steps=3), 100).training == 3 * 256


def test_nothing_is_compiled_again_after_a_refresh(monkeypatch):
    traces = []
    original = gradient_steps._loss

    def count_traces(*args):
        traces.append(1)
        return original(*args)

    monkeypatch.setattr(gradient_steps, "_loss", count_traces)
    training = Training(max_steps=96, batch_size=24, dataset_size=240, heldout_size=48, passes=1)
    network, simulator = network_and_simulator()
    _, history = train_network(zoo.key(0), network, simulator, training)
    assert len(history.refreshes) >= 8
    # The loss is traced for the steps and for held-out examples, by JAX up to twice each.
    assert 2 <= len(traces) <= 4


def test_programs_compiled_ahead_are_used():
    # Sizes that no other test has, whose programs would be cached.
    training = Training(max_steps=20, batch_size=23, dataset_size=253, heldout_size=46)
    network, simulator = network_and_simulator()
    run = train._TrainingRun(network, training, simulator, None, None)
    compilations = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with run.prefetcher(zoo.key(0), Interruption()) as sets:
        run.begin(sets.next())
        sets._upcoming.result()  # its simulation may compile programs
        before = len(compilations)
        run.compile_loss()
        run.compile_pass()
        assert len(compilations) > before + 1
        key = zoo.key(1)
        after = len(compilations)
        run.evaluate_initial()
        run.one_pass(key)
    assert len(compilations) == after
