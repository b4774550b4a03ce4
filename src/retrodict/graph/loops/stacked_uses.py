"""Find where a model stacks the values of a loop's steps into one array again."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import Var

from retrodict.graph.loops.equation_kinds import EquationKinds
from retrodict.graph.loops.recording import Recording
from retrodict.graph.loops.steps import Loop, Quantity

# Equations with one operand that change only its shape or type.
_MOVES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}
)


class StackedUse(NamedTuple):
    """An equation outside of a loop that stacks a quantity of all its steps.

    Attributes:
        quantity: the quantity.
        chain: equations that change the shape of the quantity in the last step, in order.
        eqns: those of all steps, and the equation itself.
    """

    quantity: Quantity
    chain: tuple[int, ...]
    eqns: frozenset[int]


def stacked_uses(recording: Recording, loop: Loop) -> dict[int, StackedUse]:
    """By equation, those that stack a quantity of all steps in order."""
    entries, kinds, uses = loop.entries(recording), EquationKinds(), {}
    for number, eqn in enumerate(recording.eqns):
        if recording.owner[number] < loop.stop or len(eqn.invars) != len(loop.steps):
            continue
        if eqn.primitive.name not in ("stack", "concatenate"):
            continue
        chains = [_chain(recording, atom, entries) for atom in eqn.invars]
        places = [entries.get(origin) for origin, _ in chains]
        forms = {tuple(kinds.kind(recording.eqns[n]) for n in chain) for _, chain in chains}
        if places[-1] is None or len(forms) > 1:
            continue
        _, quantity = places[-1]
        if places == [(step, quantity) for step in range(len(loop.steps))]:
            eqns = frozenset(n for _, chain in chains for n in chain)
            uses[number] = StackedUse(quantity, chains[-1][1], eqns | {number})
    return uses


def _chain(
    recording: Recording, atom: Any, entries: Mapping[Var, Any]
) -> tuple[Any, tuple[int, ...]]:
    """The quantity that an operand is a reshaped copy of, and the equations that reshape it."""
    chain: tuple[int, ...] = ()
    while isinstance(atom, Var) and atom not in entries and atom in recording.origin:
        number = recording.origin[atom]
        eqn = recording.eqns[number]
        if eqn.primitive.name not in _MOVES or len(eqn.invars) != 1:
            break
        chain, atom = (number, *chain), eqn.invars[0]
    return (atom if isinstance(atom, Var) else None), chain
