"""Functions compiled whole, with options of XLA."""

import jax
import jax.numpy as jnp
import numpy as np

from retrodict._xla.jit import QUICKLY, Compiled, known


def squares(y):
    return {f"x_{n}": value**2 for n, value in enumerate(y)}


def arguments(number):
    return [jnp.asarray(np.sin(n), jnp.float32) for n in range(number)]


def test_other_shapes_are_compiled_anew():
    compiled = Compiled(squares, QUICKLY)
    for number in (3, 5):
        np.testing.assert_allclose(compiled(arguments(number))["x_2"], np.sin(2) ** 2, rtol=1e-6)


def test_options_that_this_xla_does_not_know_are_left_out():
    options = {"xla_backend_optimization_level": "1", "xla_there_is_no_such_option": True}
    assert known(options) == {"xla_backend_optimization_level": "1"}
    assert Compiled(lambda x: x + 1, options)(1.0) == 2.0


def test_it_can_be_called_while_another_is_traced():
    # with an option that every XLA knows: those of QUICKLY may be left out where tests run
    compiled = Compiled(squares, {"xla_backend_optimization_level": "1"})
    shapes = jax.eval_shape(compiled, arguments(4))
    assert [leaf.shape for leaf in shapes.values()] == [()] * 4
    found = jax.jit(compiled)(arguments(4))
    np.testing.assert_allclose(found["x_3"], compiled(arguments(4))["x_3"], rtol=1e-6)
