"""Masked sites: elements whose density the model does not count.

A masked element of an observed site is no data: where nothing depends on its value, it is replaced
by a constant, in simulations and in data alike, so that networks cannot use it. A masked element of
a latent site has a flat, improper density. It is accepted only where no density that counts depends
on it, such as a step after the end of a series; then it is drawn from its distribution, and counts
in prior and proposal alike, so that the evidence is that of the data.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from retrodict._xla.jit import run_once
from retrodict.errors import UnsupportedModel
from retrodict.graph.evaluation import ModelStructure
from retrodict.graph.program import Program


def check_masked_latents(program: Program, structure: ModelStructure) -> None:
    """Refuse masked elements of latent sites on which a density depends that counts.

    The densities are compared at two draws that differ only in these elements.
    """
    names = [n for n, s in structure.sites.items() if s.masked and n not in program.observed]
    if not names:
        return
    as_written = replace(program, mask_latents=True)

    def changed(keys: Array) -> dict[str, Any]:
        first, second = (as_written.run(key, {}) for key in keys)
        values = dict(first.values)
        for name in names:
            mask = first.masks[name]
            values[name] = jnp.where(mask, first.values[name], second.values[name])
        after = as_written.run(None, values).log_density
        return {
            # Rounding errors differ between programs, by far less than a change of a value counts.
            name: jnp.any(jnp.abs(after[name] - density) > 1e-3 * (1 + jnp.abs(density)))
            for name, density in first.log_density.items()
        }

    keys = jax.random.split(jax.random.key(0), (4, 2))
    dependents = [n for n, flags in run_once(jax.vmap(changed), keys).items() if flags.any()]
    if dependents:
        raise UnsupportedModel(
            f"the density of latent site '{names[0]}' is masked, which is a flat, improper prior, "
            f"and the density of site '{dependents[0]}' depends on masked elements. Give "
            f"'{names[0]}' a proper distribution, however wide, without a mask"
        )
