"""Implement the commands of the command line.

Each command is a function of its options. It does not print: it passes progress notes to `note`
and returns its result as text, as plain data and as an exit status.
"""

import importlib
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from retrodict import artefact
from retrodict.cli.datafiles import read_data
from retrodict.cli.describe import (
    describe_structure,
    describe_training,
    structure_record,
    training_record,
)
from retrodict.cli.modelfiles import ModelSource, find_model, load_model
from retrodict.cli.resultfiles import (
    FIGURE_SUFFIXES,
    POSTERIOR_SUFFIXES,
    check_folder,
    check_writable,
    format_posterior,
    posterior_record,
    write_posterior,
)
from retrodict.compiled import Compiled, compile, load
from retrodict.errors import DataError, InputError
from retrodict.estimators.conditional import MADE
from retrodict.graph.trace import trace
from retrodict.inverse.inverse import invert
from retrodict.particles.posterior import Posterior
from retrodict.training.schedule import Training

Note = Callable[[str], None]

SUCCESS, UNTRUSTED = 0, 1
PICTURE_SUFFIXES = (".svg", ".png", ".dot")
REPORT_SUFFIXES = (".html",)


class CommandResult(NamedTuple):
    """The result of a command.

    Attributes:
        text: for people.
        record: the same as plain data, for `--json`.
        status: exit status.
    """

    text: str
    record: dict[str, Any]
    status: int = SUCCESS


def run_graph(options: Namespace, note: Note) -> CommandResult:
    """Show the dependency graph of a model and its inverse, and draw one of them.

    examples:
      retrodict graph model.py:rates --observed t,y -o rates.svg
      retrodict graph model.py:rates --observed t,y --inverse faithful -o inverse.png
      retrodict graph mypackage.models:rates --observed t,y --kwargs '{"n": 20}' --json
    """
    if options.output:
        check_writable(options.output, PICTURE_SUFFIXES)
    source = _load_source(options)
    graph = trace(source.model, options.observed, model_kwargs=read_kwargs(options.kwargs))
    inverse = invert(graph, options.inverse or "auto")
    if options.output:
        picture = graph.render() if options.inverse is None else inverse.render()
        picture.save(options.output)
        note(f"wrote the picture {options.output}")
    return CommandResult(describe_structure(graph, inverse), structure_record(graph, inverse))


def run_compile(options: Namespace, note: Note) -> CommandResult:
    """Compile a model, or continue its training, and save the compiled model.

    examples:
      retrodict compile model.py:rates --observed t,y -o rates.rd
      retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --report report.html
      retrodict compile model.py:rates --observed t,y -o rates.rd --minutes 5 --resume rates.rd

    Ctrl-C ends the training, saves the networks as trained so far, and exits with status 0. A
    second Ctrl-C stops at once and saves nothing. An existing compiled model is replaced only when
    the new one is complete.
    """
    _check_replaceable(options.output, options.force)
    if options.report:
        check_writable(options.report, REPORT_SUFFIXES)
    source = _load_source(options)
    compiled = _train(options, source)
    compiled.save(options.output, origin=source.origin)
    note(f"saved the compiled model to {options.output}")
    text, record = describe_training(compiled), training_record(compiled, options.output)
    if not options.report:
        return CommandResult(text, record)
    calibration = _calibrate(compiled, options, options.report, note)
    return CommandResult(
        f"{text}\n\n{calibration.text}", {**record, **calibration.record}, calibration.status
    )


def run_infer(options: Namespace, note: Note) -> CommandResult:
    """Infer the posterior of one data set or of several.

    examples:
      retrodict infer rates.rd data.json
      retrodict infer rates.rd data.csv -o posterior.nc --particles 5000
      retrodict infer rates.rd data.npz -o summary.csv --model elsewhere/model.py:rates
      echo '{"t": [94.3, 15.7], "y": [5, 1]}' | retrodict infer rates.rd - --kwargs '{"n": 2}'

    data:
      .json  an object of site → number or nested lists; a list of such objects is several data sets
      .csv   one column per site and one row per element; columns y[0], y[1], … for a site with two
             axes; if every row holds all elements of every site, each row is a data set
      .npz   one array per site
      .nc    NetCDF: the group observed_data, or the variables of the file
      If every site has an additional first axis, the file holds several data sets.
    """
    _check_infer_paths(options)
    compiled, source = _load_compiled(options)
    infer_key, prior_key = jax.random.split(jax.random.key(options.seed))
    posterior = _infer(infer_key, compiled, options)
    note(f"using the model {source.spec}")
    if options.output:
        write_posterior(options.output, posterior)
        note(f"wrote the posterior to {options.output}")
    if options.plot:
        from retrodict.plotting.posterior import draw_prior

        # The graph has the sizes it was compiled with, which --kwargs may change.
        prior = None if options.kwargs else draw_prior(prior_key, compiled.graph)
        posterior.plot(prior=prior).savefig(options.plot)
        note(f"wrote the figure {options.plot}")
    text = format_posterior(posterior)
    poor = bool(np.any(np.asarray(posterior.trust) == "poor"))
    if poor:
        text += "\nTo improve the result, use more --particles or train longer (retrodict compile)"
    return CommandResult(text, posterior_record(posterior), UNTRUSTED if poor else SUCCESS)


def run_check(options: Namespace, note: Note) -> CommandResult:
    """Test the calibration of a compiled model on synthetic data, and write a report.

    examples:
      retrodict check rates.rd -o report.html
      retrodict check rates.rd --datasets 500 --json

    The exit status is 1 if the inference is not calibrated.
    """
    if options.output:
        check_writable(options.output, REPORT_SUFFIXES)
    compiled, source = _load_compiled(options)
    note(f"using the model {source.spec}")
    return _calibrate(compiled, options, options.output, note)


def run_demo(options: Namespace, note: Note) -> CommandResult:
    """Run one of the demonstrations that come with the package.

    examples:
      retrodict demo
      retrodict demo --minutes 1 -o out
    """
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
    return CommandResult(str(text or f"see {folder}"), {"demo": name, "folder": str(folder)})


def read_kwargs(text: str | None) -> dict[str, Any]:
    """Read the model's arguments from JSON, or from a file as `@file.json`; lists become arrays."""
    if text is None:
        return {}
    where = "--kwargs"
    if text.startswith("@"):
        where, text = text[1:], Path(text[1:]).read_text(encoding="utf-8")
    try:
        kwargs = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise InputError(f"{where}: expected an object, such as '{{\"n\": 10}}'; found {text!r}")
    return {name: _list_to_array(name, value) for name, value in kwargs.items()}


def _list_to_array(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise InputError(f"--kwargs: {name}: a list must be an array of numbers")
    return array


def _load_source(options: Namespace) -> ModelSource:
    """Load the model named on the command line; `main` needs its file to explain errors."""
    source = load_model(options.model)
    options.model_file = source.file
    return source


def _load_compiled(options: Namespace) -> tuple[Compiled, ModelSource]:
    """Load a compiled model with the model of the command line or the one that its file names."""
    path: Path = options.artefact
    if options.model is not None:
        source = _load_source(options)
    else:
        header, _ = artefact.read(path)
        source = find_model(header.get("model") or {}, path)
        options.model_file = source.file
    return load(path, source.model), source


def _train(options: Namespace, source: ModelSource) -> Compiled:
    kwargs = read_kwargs(options.kwargs)
    max_seconds = None if options.minutes is None else 60 * options.minutes
    training = Training(**_without_none(max_seconds=max_seconds, max_steps=options.steps))
    key = jax.random.key(options.seed)
    if options.resume:
        compiled = _load_for_training(options, source)
        return compiled.train(key, training, progress_bar=options.progress)
    return compile(
        key,
        source.model,
        options.observed,
        model_kwargs=kwargs,
        inverse=options.inverse,
        estimator=MADE(**_without_none(hidden=options.hidden, components=options.components)),
        training=training,
        progress_bar=options.progress,
    )


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _load_for_training(options: Namespace, source: ModelSource) -> Compiled:
    if any((options.kwargs, options.hidden, options.components)):
        raise InputError("--resume does not allow --kwargs, --hidden or --components to change")
    compiled = load(options.resume, source.model)
    observed = compiled.graph.named_observed
    if set(options.observed) != set(observed):
        raise InputError(
            f"{options.resume} was compiled for the data {', '.join(observed)}, not for "
            f"{', '.join(options.observed)}"
        )
    return compiled


def _infer(rng_key: PRNGKeyArray, compiled: Compiled, options: Namespace) -> Posterior:
    data = read_data(options.data, compiled.graph)
    if options.plot and data.batched:
        raise InputError(f"--plot draws one data set, but {options.data} holds several")
    kwargs = None
    if options.kwargs is not None:
        kwargs = {**compiled.graph.program.kwargs, **read_kwargs(options.kwargs)}
    infer = compiled.infer_many if data.batched else compiled.infer
    method = options.method
    try:
        return infer(rng_key, data.values, options.particles, method=method, model_kwargs=kwargs)
    except DataError:
        raise
    except ValueError as error:
        # The model does not allow the method, or its networks do not allow the sizes.
        raise InputError(str(error)) from error


def _check_replaceable(path: Path, force: bool) -> None:
    """Refuse to replace a file that is not a compiled model, unless forced."""
    check_folder(path)
    if force or not path.exists():
        return
    try:
        with suppress(artefact.OlderFormat):  # compiling again is what its message asks for
            artefact.read(path)
    except artefact.DamagedFile as error:
        message = f"{path} exists and is not a compiled model; --force replaces it"
        raise InputError(message) from error
    except artefact.NewerFormat as error:
        raise InputError(f"{error}; --force replaces it") from error


def _check_infer_paths(options: Namespace) -> None:
    if options.output:
        check_writable(options.output, POSTERIOR_SUFFIXES)
        data = Path(options.data)
        if options.output.exists() and data.exists() and data.samefile(options.output):
            raise InputError(f"the output {options.output} is the data file; name another file")
    if options.plot:
        check_writable(options.plot, FIGURE_SUFFIXES)
    if options.data != "-" and not Path(options.data).is_file():
        raise InputError(f"there is no data file {options.data}")


def _calibrate(
    compiled: Compiled, options: Namespace, path: Path | None, note: Note
) -> CommandResult:
    from retrodict.evaluation.calibrate import calibrate
    from retrodict.evaluation.report import judge, write_report

    note(f"inferring {options.datasets} synthetic data sets")
    calibration = calibrate(
        jax.random.key(options.seed + 1),
        compiled,
        num_datasets=options.datasets,
        num_particles=options.particles,
    )
    if path is not None:
        write_report(path, compiled, calibration)
        note(f"wrote the report {path}")
    verdict = judge(calibration)
    lines = [f"{calibration.summary()}", "", verdict.headline]
    lines += [f"  - {reason}" for reason in verdict.reasons]
    passed = bool(calibration.passed)
    record = {"passed": passed, "verdict": verdict.headline, "reasons": verdict.reasons}
    return CommandResult("\n".join(lines), record, SUCCESS if passed else UNTRUSTED)


COMMANDS: Mapping[str, Callable[[Namespace, Note], CommandResult]] = {
    "graph": run_graph,
    "compile": run_compile,
    "infer": run_infer,
    "check": run_check,
    "demo": run_demo,
}
