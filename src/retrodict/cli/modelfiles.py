"""`file.py:function` or `package.module:function` in; the model it names out.

Also finds the model of an artefact again. Whoever makes an artefact chooses what it says of its
model, and the model will be called with the arguments in the artefact; so only files beside the
artefact or in the current folder are run without being named on the command line.
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

EXPECTED = "file.py:function or package.module:function"


class ModelError(InputError):
    """There is no model where the user said; the message says what there is."""


@dataclass(frozen=True)
class Source:
    """A model and where it came from.

    Attributes:
        model: the function.
        spec: what to write to have it again.
        origin: the same, as an artefact keeps it.
        file: the file it was read from, if there is one.
    """

    model: Callable[..., Any]
    spec: str
    origin: Mapping[str, str | None]
    file: str | None


def load_model(spec: str) -> Source:
    """The model that the command line names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ModelError(f"the model is {spec!r}, expected {EXPECTED}.{_functions_of(spec)}")
    if place.endswith(".py") or "/" in place or os.sep in place:
        return _source(_run_file(Path(place)), name, place)
    return _source(_import(place, Path.cwd()), name, place)


def find_model(origin: Mapping[str, Any], artefact: Path) -> Source:
    """The model that an artefact says it was made from, if it lies where it can be run safely."""
    module, name, file = (origin.get(key) for key in ("module", "name", "file"))
    remedy = "give the model it was compiled from with --model " + EXPECTED
    if not file or not name or "<" in f"{file}{name}":
        raise ModelError(f"{artefact} does not say where its model is: {remedy}")
    recorded = PurePosixPath(file)
    if module == "__main__":
        raise ModelError(
            f"{artefact} was made by running {file}, which importing would run again: if that is "
            f"meant, say --model {file}:{name}"
        )
    if recorded.is_absolute() or ".." in recorded.parts:
        raise ModelError(f"{artefact} names a model outside of its folder, {file}: {remedy}")
    folder = artefact.resolve().parent
    places = [Path.cwd() / recorded, folder / recorded, folder / recorded.name]
    for place in dict.fromkeys(places):
        if place.is_file():
            root = _root(place, module)
            if root is None:
                return _source(_run_file(place), name, os.path.relpath(place))
            found = _import(str(module), root)
            if getattr(found, "__file__", None) != str(place):
                raise ModelError(
                    f"{artefact} names the module {module}, which is another than "
                    f"{os.path.relpath(place)}: {remedy}"
                )
            return _source(found, name, str(module))
    looked = ", ".join(dict.fromkeys(map(os.path.relpath, places)))
    raise ModelError(
        f"cannot find the model of {artefact}, the function {name} of {file}: looked for {looked}. "
        f"Say where it is with --model {EXPECTED}"
    )


def line_at_fault(error: BaseException, file: str | None) -> int | None:
    """The last line of the model's file that an error, or one behind it, passed through."""
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        lines = [f.lineno for f in frames if file is not None and f.filename == file]
        if lines:
            return lines[-1]
        seen = seen.__cause__ or seen.__context__
    return None


def _root(place: Path, module: str | None) -> Path | None:
    """The folder that a module of a package is imported from, if the file lies in a package."""
    parts = (module or "").split(".")
    package = (place.parent / "__init__.py").is_file()
    if len(parts) < 2 or not package or (*place.parts[:-1], place.stem)[-len(parts) :] != (*parts,):
        return None
    return place.parents[len(parts) - 1]


def _run_file(path: Path) -> ModuleType:
    path = Path(os.path.abspath(path))  # noqa: PTH100 (links stay: modules beside them are meant)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, 3) or near[:5]
        hint = f"; there is {', '.join(close)}" if close else ""
        kind = "is not a file" if path.exists() else "does not exist"
        raise ModelError(f"the model's file {os.path.relpath(path)} {kind}{hint}")
    # Under its own name, as Python would import it, unless something else has that name.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = f"model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{os.path.relpath(path)} is no Python file; expected {EXPECTED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _look_in(path.parent)
    loader = spec.loader
    _run(lambda: loader.exec_module(module), os.path.relpath(path), str(path))
    return module


def _import(name: str, folder: Path) -> ModuleType:
    _look_in(folder)
    try:
        found: ModuleType = _run(lambda: importlib.import_module(name), name, None)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and name.startswith(f"{cause.name}"):
            raise ModelError(
                f"there is no module {name!r} here or installed; for a file write {EXPECTED}"
            ) from cause
        raise
    return found


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _run(action: Callable[[], Any], what: str, file: str | None) -> Any:
    try:
        return action()
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else line_at_fault(error, file)
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        where = "" if line is None else f" at line {line}"
        raise ModelError(
            f"importing {what} failed{where}: {type(error).__name__}: {said}"
        ) from error


def _source(module: ModuleType, name: str, place: str) -> Source:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ModelError(f"{place} has no function {name!r}{_hint(module, name)}")
    if not callable(found):
        raise ModelError(
            f"{place}:{name} is not a function but of type {type(found).__name__}"
            f"{_hint(module, name)}"
        )
    file = getattr(module, "__file__", None)
    return Source(found, f"{place}:{name}", _origin(module, name, file), file)


def _origin(module: ModuleType, name: str, file: str | None) -> dict[str, str | None]:
    """Where the model is, without saying where on this computer: relative to here, or its name."""
    kept = None
    if file is not None:
        path, here = Path(file), Path.cwd()
        kept = path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name
    return {"module": module.__name__, "name": name, "file": kept}


def _hint(module: ModuleType, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    return _suggest(name, own)


def _suggest(name: str, names: list[str]) -> str:
    if not names:
        return "; it has no functions"
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; it has {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"


def _functions_of(spec: str) -> str:
    """What could be meant by a file alone, read without running it."""
    path = Path(spec.rstrip(":"))
    if path.suffix != ".py" or not path.is_file():
        return ""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return ""
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return f" For instance {path}:{names[0]}" if names else f" {path} has no functions"
