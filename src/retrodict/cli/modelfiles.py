"""Load the model that the command line or an artefact names.

The command line names a model as `file.py:function` or `package.module:function`. An artefact
records where its model was. This record is not trusted: whoever made the artefact chose the
function and its arguments. Without a model on the command line, only files in the artefact's folder
or in the current folder are run.
"""

import ast
import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from retrodict.errors import InputError

MODEL_SYNTAX = "file.py:function or package.module:function"


class ModelError(InputError):
    """The model cannot be found or imported; the message says what there is instead."""


@dataclass(frozen=True)
class ModelSource:
    """A model and where it was loaded from.

    Attributes:
        model: the function.
        spec: how the command line names it.
        origin: its module, name and file, as an artefact records them.
        file: path of the file it was loaded from, if any.
    """

    model: Callable[..., Any]
    spec: str
    origin: Mapping[str, str | None]
    file: str | None


def load_model(spec: str) -> ModelSource:
    """Load the model that the command line names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ModelError(f"the model is {spec!r}, expected {MODEL_SYNTAX}.{_suggest_spec(spec)}")
    if place.endswith(".py") or "/" in place or os.sep in place:
        return _model_source(_run_file(Path(place)), name, place)
    return _model_source(_import(place, Path.cwd()), name, place)


def find_model(origin: Mapping[str, Any], artefact: Path) -> ModelSource:
    """Load the model that an artefact was compiled from, if its recorded origin is safe to run."""
    module, name, file = (origin.get(key) for key in ("module", "name", "file"))
    remedy = "give the model it was compiled from with --model " + MODEL_SYNTAX
    if not file or not name or "<" in f"{file}{name}":
        raise ModelError(f"{artefact} does not record where its model is: {remedy}")
    relative = PurePosixPath(file)
    if module == "__main__":
        raise ModelError(
            f"{artefact} was made by the script {file}, and loading its model would run the script "
            f"again: to do so, give --model {file}:{name}"
        )
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelError(f"{artefact} names a model outside of its folder, {file}: {remedy}")
    folder = artefact.resolve().parent
    paths = dict.fromkeys([Path.cwd() / relative, folder / relative, folder / relative.name])
    for path in paths:
        if path.is_file():
            return _load_recorded(path, module, name, artefact, remedy)
    raise ModelError(
        f"cannot find the model of {artefact}, the function {name} of {file}: looked for "
        f"{', '.join(map(os.path.relpath, paths))}; {remedy}"
    )


def _load_recorded(
    path: Path, module: str | None, name: str, artefact: Path, remedy: str
) -> ModelSource:
    """Load a model from its file, or from its package if the file belongs to one."""
    root = _import_root(path, module)
    if root is None:
        return _model_source(_run_file(path), name, os.path.relpath(path))
    imported = _import(str(module), root)
    if getattr(imported, "__file__", None) != str(path):
        raise ModelError(
            f"{artefact} names the module {module}, but its file is not {os.path.relpath(path)}: "
            f"{remedy}"
        )
    return _model_source(imported, name, str(module))


def find_error_line(error: BaseException, file: str | None) -> int | None:
    """Return the last line of the file in the traceback of an error or of its causes."""
    link: BaseException | None = error
    while link is not None:
        frames = traceback.extract_tb(link.__traceback__)
        lines = [f.lineno for f in frames if file is not None and f.filename == file]
        if lines:
            return lines[-1]
        link = link.__cause__ or link.__context__
    return None


def _import_root(path: Path, module: str | None) -> Path | None:
    """Return the folder from which to import the module, or None if it is in no package."""
    parts = (module or "").split(".")
    package = (path.parent / "__init__.py").is_file()
    if len(parts) < 2 or not package or (*path.parts[:-1], path.stem)[-len(parts) :] != (*parts,):
        return None
    return path.parents[len(parts) - 1]


def _run_file(path: Path) -> ModuleType:
    # Symbolic links are not resolved: the model imports modules from the link's folder.
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if not path.is_file():
        names = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        similar = difflib.get_close_matches(path.name, names, 3) or names[:5]
        hint = f"; there is {', '.join(similar)}" if similar else ""
        finding = "is not a file" if path.exists() else "does not exist"
        raise ModelError(f"the model's file {os.path.relpath(path)} {finding}{hint}")
    # Use the name that Python's import would use, unless another module has it.
    name = path.stem
    namesake = sys.modules.get(name)
    if namesake is not None and getattr(namesake, "__file__", None) != str(path):
        name = f"model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{os.path.relpath(path)} is not a Python file; expected {MODEL_SYNTAX}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _add_to_sys_path(path.parent)
    loader = spec.loader
    _run(lambda: loader.exec_module(module), os.path.relpath(path), str(path))
    return module


def _import(name: str, folder: Path) -> ModuleType:
    _add_to_sys_path(folder)
    try:
        module: ModuleType = _run(lambda: importlib.import_module(name), name, None)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and name.startswith(f"{cause.name}"):
            raise ModelError(
                f"there is no module {name!r}, neither in this folder nor installed; expected "
                f"{MODEL_SYNTAX}"
            ) from cause
        raise
    return module


def _add_to_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run(action: Callable[[], Any], target: str, file: str | None) -> Any:
    """Run an import and turn its errors into `ModelError`s that name the line."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else find_error_line(error, file)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        where = "" if line is None else f" at line {line}"
        raise ModelError(
            f"importing {target} failed{where}: {type(error).__name__}: {message}"
        ) from error


def _model_source(module: ModuleType, name: str, place: str) -> ModelSource:
    model: Any = module
    for part in name.split("."):
        model = getattr(model, part, None)
        if model is None:
            raise ModelError(f"{place} has no function {name!r}{_suggest_function(module, name)}")
    if not callable(model):
        raise ModelError(
            f"{place}:{name} is not a function but of type {type(model).__name__}"
            f"{_suggest_function(module, name)}"
        )
    file = getattr(module, "__file__", None)
    return ModelSource(model, f"{place}:{name}", _origin(module, name, file), file)


def _origin(module: ModuleType, name: str, file: str | None) -> dict[str, str | None]:
    """Return what an artefact records; paths are relative, so that they reveal no other folders."""
    recorded = None
    if file is not None:
        path, folder = Path(file), Path.cwd()
        recorded = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    return {"module": module.__name__, "name": name, "file": recorded}


def _suggest_function(module: ModuleType, name: str) -> str:
    names = [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    if not names:
        return "; it has no functions"
    similar = difflib.get_close_matches(name, names, 1)
    if similar:
        return f"; did you mean {similar[0]!r}?"
    return f"; it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"


def _suggest_spec(spec: str) -> str:
    """Suggest a function of the file, which is parsed but not run."""
    path = Path(spec.rstrip(":"))
    if path.suffix != ".py" or not path.is_file():
        return ""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return ""
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return f" For instance {path}:{names[0]}" if names else f" {path} has no functions"
