"""Run a recorded model with its loops as scans and plates: an ordinary NumPyro model again.

A loop whose steps depend on one another becomes a `scan`; what they take from earlier steps is the
carry. A loop of independent steps becomes a plate. The sites of a loop become one site each, with a
leading axis of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpyro

from retrodict.graph.loops.environment import Environment
from retrodict.graph.loops.recording import Recording
from retrodict.graph.loops.runner import LoopRunner, sample
from retrodict.graph.loops.steps import Loop


@dataclass(frozen=True)
class LiftedModel:
    """A NumPyro model that draws what a recorded model draws.

    Attributes:
        recording: the model.
        loops: those that become scans and plates.
        names: for each loop, what its sites are called.
    """

    recording: Recording
    loops: tuple[Loop, ...]
    names: tuple[tuple[str, ...], ...]

    def __call__(self) -> None:
        """Run it, under a handler that gives the sites their values."""
        values = Environment(self.recording, dict(self.recording.constants))
        runners, number = {runner.loop.start: runner for runner in self._runners}, 0
        while number < len(self.recording.statements):
            if number in runners:
                runners[number].run(values)
                number = runners[number].loop.stop
                continue
            statement = self.recording.statements[number]
            leaves = values.read(statement.leaves)
            if statement.value is None:
                numpyro.deterministic(statement.name, leaves[0])
            else:
                fn = jax.tree.unflatten(statement.tree, leaves)
                values.known[statement.value] = sample(statement.name, fn, statement)
            number += 1

    @cached_property
    def _runners(self) -> Sequence[LoopRunner]:
        pairs = zip(self.loops, self.names, strict=True)
        return [LoopRunner(self.recording, loop, names) for loop, names in pairs]
