"""Find where a model puts the values of a loop's steps together into one array again."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import Var

from retrodict.graph.loops.equation_kinds import EquationKinds
from retrodict.graph.loops.recording import Recording
from retrodict.graph.loops.steps import Loop, Quantity, SiteValue

# Equations of one operand that change its shape or type and nothing else.
_MOVES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}
)


class StackedUse(NamedTuple):
    """An equation outside of a loop that puts a quantity of all its steps together.

    Attributes:
        quantity: which.
        chain: equations of the last step's operand, from the quantity on.
        eqns: those of all steps, and the equation itself.
    """

    quantity: Quantity
    chain: tuple[int, ...]
    eqns: frozenset[int]


def entries_of(recording: Recording, loop: Loop) -> dict[Var, tuple[int, Quantity]]:
    """Variables that a loop gives as entries of arrays: all but results of special steps."""
    return {
        var: (step, quantity)
        for var, (step, quantity) in loop.quantities(recording).items()
        if step >= loop.special or isinstance(quantity, SiteValue)
    }


def stacked_uses(recording: Recording, loop: Loop) -> dict[int, StackedUse]:
    """By equation, those that put a quantity of all steps together in order."""
    inside, kinds = entries_of(recording, loop), EquationKinds()
    found = {}
    for number, eqn in enumerate(recording.eqns):
        if recording.owner[number] < loop.stop or len(eqn.invars) != len(loop.steps):
            continue
        if eqn.primitive.name not in ("stack", "concatenate"):
            continue
        chains = [_chain(recording, atom, inside) for atom in eqn.invars]
        places = [inside.get(base) if isinstance(base, Var) else None for base, _ in chains]
        forms = {tuple(kinds.kind(recording.eqns[n]) for n in chain) for _, chain in chains}
        last = places[-1]
        if last is None or len(forms) > 1:
            continue
        if places == [(step, last[1]) for step in range(len(loop.steps))]:
            every = frozenset(n for _, chain in chains for n in chain)
            found[number] = StackedUse(last[1], chains[-1][1], every | {number})
    return found


def _chain(
    recording: Recording, atom: Any, inside: Mapping[Var, Any]
) -> tuple[Any, tuple[int, ...]]:
    """The quantity that an operand is made of by changing its shape, and the equations that do."""
    chain: list[int] = []
    while isinstance(atom, Var) and atom not in inside and atom in recording.origin:
        number = recording.origin[atom]
        eqn = recording.eqns[number]
        if eqn.primitive.name not in _MOVES or len(eqn.invars) != 1:
            break
        chain.append(number)
        atom = eqn.invars[0]
    return atom, tuple(reversed(chain))
