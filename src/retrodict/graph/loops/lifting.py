"""Lift the Python loops of a model over numbered sites into scans and plates.

The lifted model is an ordinary NumPyro model again. A loop whose steps depend on earlier ones
becomes a `scan`, which carries what they depend on. A loop of independent steps becomes a plate.
The sites `x_0, x_1, …` become one site with a leading axis of steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import numpyro

from retrodict.graph.evaluation import ModelStructure
from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.matching import find_loops, numbered
from retrodict.graph.loops.recording import Recording, record
from retrodict.graph.loops.runner import LoopRunner, sample
from retrodict.graph.loops.steps import Loop, SiteBlock
from retrodict.graph.program import Program


class Lifted(NamedTuple):
    """A program whose loops are scans and plates.

    Attributes:
        program: the lifted model with its arguments.
        loops: for each loop, the names of its sites in all steps, by the name of the lifted site.
    """

    program: Program
    loops: tuple[Mapping[str, tuple[str, ...]], ...] = ()


def lift(program: Program, structure: ModelStructure) -> Lifted:
    """Lift all loops that can be lifted; the program itself if there are none."""
    if structure.scan_lengths or not any(map(numbered, structure.order)):
        return Lifted(program)
    recording = record(program, structure.shapes)
    loops = () if recording is None else find_loops(recording)
    if recording is None or not loops:
        return Lifted(program)
    taken = set(structure.order)
    steps = tuple(
        {
            _name(blocks[0], taken): tuple(block.statement.name for block in blocks)
            for blocks in zip(*loop.steps, strict=True)
        }
        for loop in loops
    )
    lifted_name = {user: name for loop in steps for name, users in loop.items() for user in users}
    lifted = replace(
        program,
        model=LiftedModel(recording, loops, tuple(map(tuple, steps))),
        args=(),
        kwargs={},
        observed=frozenset(lifted_name.get(name, name) for name in program.observed),
    )
    return Lifted(lifted, steps)


def _name(block: SiteBlock, taken: set[str]) -> str:
    """A name that no other site has and that does not depend on the number of steps."""
    parts = numbered(block.statement.name)
    assert parts is not None
    name = f"{parts.before}…{parts.after}"
    while name in taken:
        name += "′"
    taken.add(name)
    return name


@dataclass(frozen=True)
class LiftedModel:
    """A NumPyro model that samples what a recorded model samples.

    Attributes:
        recording: the model.
        loops: the loops that become scans and plates.
        names: for each loop, the names of its sites.
    """

    recording: Recording
    loops: tuple[Loop, ...]
    names: tuple[tuple[str, ...], ...]

    def __call__(self) -> None:
        """Run the model under handlers that set the values of its sites."""
        environment = Environment(self.recording, dict(self.recording.constants))
        for number, statement in enumerate(self.recording.statements):
            if number in self._runners:
                self._runners[number].run(environment)
            if any(loop.contains(number) for loop in self.loops):
                continue
            leaves = environment.read(statement.leaves)
            if statement.value is None:
                numpyro.deterministic(statement.name, leaves[0])
            else:
                fn = jax.tree.unflatten(statement.tree, leaves)
                environment.values[statement.value] = sample(statement.name, fn, statement)

    @cached_property
    def _runners(self) -> Mapping[int, LoopRunner]:
        """By the first statement of a loop, what runs it."""
        pairs = zip(self.loops, self.names, strict=True)
        return {loop.start: LoopRunner(self.recording, loop, names) for loop, names in pairs}
