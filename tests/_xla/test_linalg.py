"""Batched factorisations of small matrices, against NumPy's."""

import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla.linalg import cholesky, invert_lower_triangular
from retrodict._xla.tuning import MAX_UNROLLED_COLUMNS


@pytest.mark.parametrize("size", [1, 3, MAX_UNROLLED_COLUMNS + 3])
def test_factorisations_equal_those_of_numpy(size):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(4, size, size))
    matrix = matrix @ matrix.swapaxes(1, 2) + np.eye(size)
    lower = cholesky(jnp.asarray(matrix))
    np.testing.assert_allclose(lower, np.linalg.cholesky(matrix), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        invert_lower_triangular(lower), np.linalg.inv(lower), rtol=1e-3, atol=1e-4
    )
