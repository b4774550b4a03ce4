"""Lift the Python loops of a model over numbered sites into scans and plates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from retrodict.graph.evaluation import ModelStructure
from retrodict.graph.loops.lifted_model import LiftedModel
from retrodict.graph.loops.matching import find_loops, numbered
from retrodict.graph.loops.recording import record
from retrodict.graph.loops.steps import Loop
from retrodict.graph.program import Program


class Lifted(NamedTuple):
    """A program whose loops are scans and plates.

    Attributes:
        program: runs the lifted model.
        loops: for each loop, the names of its steps' sites, by the site that stands for them.
    """

    program: Program
    loops: tuple[Mapping[str, tuple[str, ...]], ...] = ()


def lift(program: Program, structure: ModelStructure) -> Lifted:
    """Lift all loops that can be; the program itself where there are none."""
    if structure.scan_lengths or not any(map(numbered, structure.order)):
        return Lifted(program)
    recording = record(program, structure.shapes)
    loops = () if recording is None else find_loops(recording, program.observed)
    if recording is None or not loops:
        return Lifted(program)
    taken = set(structure.order)
    names = tuple(tuple(_name(loop, p, taken) for p in range(_size(loop))) for loop in loops)
    steps = tuple(
        {name: tuple(s.statements[p].name for s in loop.steps) for p, name in enumerate(each)}
        for loop, each in zip(loops, names, strict=True)
    )
    model = LiftedModel(recording, loops, names)
    lifted = replace(program, model=model, args=(), kwargs={}, observed=_observed(program, steps))
    return Lifted(lifted, steps)


def _observed(program: Program, loops: tuple[Mapping[str, tuple[str, ...]], ...]) -> frozenset[str]:
    inside = {user: name for loop in loops for name, steps in loop.items() for user in steps}
    return frozenset(inside.get(name, name) for name in program.observed)


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
