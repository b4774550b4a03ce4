"""Lift the Python loops of a model over numbered sites into scans and plates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from retrodict.graph.lifted_model import LiftedModel
from retrodict.graph.loop_matching import Loop, find_loops, numbered
from retrodict.graph.program import Notes, Program
from retrodict.graph.recording import record


class Lifted(NamedTuple):
    """A program whose loops are scans and plates.

    Attributes:
        program: runs the lifted model.
        steps: for each site that stands for those of a loop, the user's names of its steps.
    """

    program: Program
    steps: Mapping[str, tuple[str, ...]]


def lift(program: Program, notes: Notes) -> Lifted:
    """Lift all loops that can be; the program itself where there are none."""
    if notes.scan_lengths or not any(map(numbered, notes.order)):
        return Lifted(program, {})
    recording = record(program, notes.shapes)
    loops = () if recording is None else find_loops(recording, program.observed)
    if recording is None or not loops:
        return Lifted(program, {})
    taken = set(notes.order)
    names = tuple(tuple(_name(loop, p, taken) for p in range(_size(loop))) for loop in loops)
    steps = {
        name: tuple(step.statements[position].name for step in loop.steps)
        for loop, each in zip(loops, names, strict=True)
        for position, name in enumerate(each)
    }
    observed = {name for name, own in steps.items() if own[0] in program.observed}
    observed |= program.observed - {name for own in steps.values() for name in own}
    model = LiftedModel(recording, loops, names)
    lifted = replace(program, model=model, args=(), kwargs={}, observed=frozenset(observed))
    return Lifted(lifted, steps)


def _size(loop: Loop) -> int:
    return len(loop.template.statements)


def _name(loop: Loop, position: int, taken: set[str]) -> str:
    """A name that no other site has and that does not depend on the number of steps."""
    parts = numbered(loop.template.statements[position].name)
    assert parts is not None
    name = f"{parts.before}…{parts.after}"
    while name in taken:
        name += "′"
    taken.add(name)
    return name
