"""The arguments of a command in; what it found out, as text, as plain data, and as exit status.

One function a command, each a few calls of the library. Nothing is printed here: notes on the way
go to `say`, answers into the `Answer`.
"""

import importlib
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from retrodict import artefact
from retrodict.cli.datafiles import read_data
from retrodict.cli.describe import structure, structure_record, training, training_record
from retrodict.cli.modelfiles import Source, find_model, load_model
from retrodict.cli.resultfiles import (
    FIGURES,
    SUFFIXES,
    check_place,
    check_writable,
    finite,
    record,
    screen,
    write_posterior,
)
from retrodict.compiled import Compiled, compile, load
from retrodict.errors import DataError, InputError
from retrodict.estimators.conditional import MADE
from retrodict.graph.trace import trace
from retrodict.inverse.inverse import invert
from retrodict.training.train import Training

Say = Callable[[str], None]

DONE, UNTRUSTED = 0, 1
PICTURES = (".svg", ".png", ".dot")


class Answer(NamedTuple):
    """What a command found: for people, for machines, and for the shell."""

    text: str
    record: dict[str, Any]
    status: int = DONE


def graph(options: Namespace, say: Say) -> Answer:
    """Read a model, turn it round, and draw one or the other."""
    if options.output:
        check_writable(options.output, PICTURES)
    source = load_model(options.model)
    options.file = source.file
    found = trace(source.model, options.observed, model_kwargs=read_kwargs(options.kwargs))
    inverse = invert(found, options.inverse or "auto")
    if options.output:
        picture = found.render() if options.inverse is None else inverse.render()
        picture.save(options.output)
        say(f"drawn to {options.output}")
    return Answer(structure(found, inverse), structure_record(found, inverse))


def compile_model(options: Namespace, say: Say) -> Answer:
    """Train the networks of a model, and keep them in a file."""
    _check_artefact_place(options.output, options.force)
    if options.report:
        check_writable(options.report, (".html",))
    source = load_model(options.model)
    options.file = source.file
    kwargs = read_kwargs(options.kwargs)
    limits = {
        "max_seconds": None if options.minutes is None else 60 * options.minutes,
        "max_steps": options.steps,
    }
    size = {"hidden": options.hidden, "components": options.components}
    training_limits = Training(**{k: value for k, value in limits.items() if value is not None})
    key = jax.random.key(options.seed)
    if options.resume:
        compiled = _resumed(options, source).train(
            key, training_limits, progress_bar=options.progress
        )
    else:
        compiled = compile(
            key,
            source.model,
            options.observed,
            model_kwargs=kwargs,
            inverse=options.inverse,
            estimator=MADE(**{k: value for k, value in size.items() if value is not None}),
            training=training_limits,
            progress_bar=options.progress,
        )
    compiled.save(options.output, origin=source.origin)
    say(f"saved to {options.output}")
    answer = Answer(training(compiled), training_record(compiled, options.output))
    if not options.report:
        return answer
    checked = _calibrated(compiled, options, options.report, say)
    return Answer(
        f"{answer.text}\n\n{checked.text}", {**answer.record, **checked.record}, checked.status
    )


def infer(options: Namespace, say: Say) -> Answer:
    """The posterior of a data set, or of each of several."""
    if options.output:
        check_writable(options.output, SUFFIXES)
        if options.data != "-" and _same(options.output, Path(options.data)):
            raise InputError(f"the output {options.output} is the data file itself; name another")
    if options.plot:
        check_writable(options.plot, FIGURES)
    if options.data != "-" and not Path(options.data).is_file():
        raise InputError(f"there is no data file {options.data}")
    compiled, source = _loaded(options)
    data = read_data(options.data, compiled.graph)
    if options.plot and data.many:
        raise InputError(f"--plot draws one data set, and {options.data} holds several")
    given = None
    if options.kwargs is not None:
        given = {**compiled.graph.program.kwargs, **read_kwargs(options.kwargs)}
    run = compiled.infer_many if data.many else compiled.infer
    key, prior_key = jax.random.split(jax.random.key(options.seed))
    try:
        posterior = run(
            key, data.values, options.particles, method=options.method, model_kwargs=given
        )
    except DataError:
        raise
    except ValueError as error:
        # A method that this model does not allow, sizes that its networks cannot take.
        raise InputError(str(error)) from error
    say(f"the model is {source.spec}")
    if options.output:
        write_posterior(options.output, posterior)
        say(f"written to {options.output}")
    if options.plot:
        from retrodict.plotting.posterior import draw_prior

        # Sizes may differ from those of the prior at hand, if the model is called otherwise.
        prior = None if given else draw_prior(prior_key, compiled.graph)
        posterior.plot(prior=prior).savefig(options.plot)
        say(f"drawn to {options.plot}")
    text = screen(posterior)
    poor = bool(np.any(np.asarray(posterior.trust) == "poor"))
    if poor:
        text += "\nTo do better: more --particles, or a longer training (retrodict compile)"
    return Answer(text, record(posterior), UNTRUSTED if poor else DONE)


def check(options: Namespace, say: Say) -> Answer:
    """Try a compiled model on fresh synthetic data, and write a report."""
    if options.output:
        check_writable(options.output, (".html",))
    compiled, source = _loaded(options)
    say(f"the model is {source.spec}")
    return _calibrated(compiled, options, options.output, say)


def demo(options: Namespace, say: Say) -> Answer:
    """Run one of the examples that come with the package."""
    try:
        demos = importlib.import_module("retrodict.demos")
    except ModuleNotFoundError as error:
        if error.name != "retrodict.demos":
            raise
        raise InputError("this installation of retrodict has no demonstrations") from error
    names = tuple(demos.NAMES)
    name = options.name or names[0]
    if name not in names:
        raise InputError(f"there is no demonstration {name!r}; there are {', '.join(names)}")
    folder = options.output
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the output {folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    text = demos.run(name, folder, minutes=options.minutes, progress_bar=options.progress)
    return Answer(str(text or f"see {folder}"), {"demo": name, "folder": str(folder)})


def read_kwargs(text: str | None) -> dict[str, Any]:
    """Arguments of the model from JSON, or from a file as `@file.json`; lists become arrays."""
    if text is None:
        return {}
    where = "--kwargs"
    if text.startswith("@"):
        where, text = text[1:], Path(text[1:]).read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{where}: expected an object, such as '{{\"n\": 10}}'; found {text!r}")
    return {name: _argument(name, value) for name, value in found.items()}


def _argument(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise InputError(f"--kwargs: {name}: a list must be an array of numbers")
    return array


def _loaded(options: Namespace) -> tuple[Compiled, Source]:
    """The artefact, with the model that was named or that it names itself."""
    path: Path = options.artefact
    if options.model is not None:
        source = load_model(options.model)
    else:
        header, _ = artefact.read(path)
        source = find_model(header.get("model") or {}, path)
    options.file = source.file
    return load(path, source.model), source


def _resumed(options: Namespace, source: Source) -> Compiled:
    """What to go on training from; its sizes and arguments stay as they were."""
    if any((options.kwargs, options.hidden, options.components)):
        raise InputError("--resume keeps --kwargs, --hidden and --components as they were")
    compiled = load(options.resume, source.model)
    observed = compiled.graph.observed
    if set(options.observed) != set(observed):
        raise InputError(
            f"{options.resume} was compiled for the data {', '.join(observed)}, not for "
            f"{', '.join(options.observed)}"
        )
    return compiled


def _check_artefact_place(path: Path, force: bool) -> None:
    """An artefact may be replaced by a newer one; any other file only if that is meant."""
    check_place(path)
    if force or not path.exists():
        return
    try:
        artefact.read(path)
    except artefact.DamagedFile as error:
        raise InputError(f"{path} exists and is no compiled model; --force replaces it") from error
    except artefact.NewerFormat as error:
        raise InputError(f"{error}; --force replaces it") from error


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _calibrated(compiled: Compiled, options: Namespace, path: Path | None, say: Say) -> Answer:
    from retrodict.evaluation.calibrate import calibrate
    from retrodict.evaluation.report import judge, write_report

    say(f"inferring {options.datasets} synthetic data sets")
    found = calibrate(
        jax.random.key(options.seed + 1),
        compiled,
        num_datasets=options.datasets,
        num_particles=options.particles,
    )
    if path is not None:
        write_report(path, compiled, found)
        say(f"reported to {path}")
    said = judge(found)
    record = {"passed": bool(found.passed), "verdict": said.headline, "reasons": list(said.reasons)}
    text = "\n".join([f"{found.summary()}", "", said.headline, *(f"  - {r}" for r in said.reasons)])
    return Answer(text, finite(record), DONE if found.passed else UNTRUSTED)


COMMANDS: Mapping[str, Callable[[Namespace, Say], Answer]] = {
    "graph": graph,
    "compile": compile_model,
    "infer": infer,
    "check": check,
    "demo": demo,
}
