"""Compiler options: the shipped ones are supported, unsupported ones are dropped with a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._xla import jit, tuning
from retrodict._xla.jit import CompiledFunction, floats, low_latency_jit, run_once

UNKNOWN = {"xla_there_is_no_such_option": True}


@pytest.fixture(autouse=True)
def untested_options():
    """Forget which options have been tested, and warned about, in this process."""
    for function in (jit._is_supported, jit._compiles_with):
        function.cache_clear()


def test_an_unsupported_option_is_dropped_and_the_others_are_kept():
    supported = {"xla_backend_optimization_level": "1"}
    with pytest.warns(UserWarning, match="xla_there_is_no_such_option"):
        assert jit.supported_options({**supported, **UNKNOWN}) == supported


def test_a_function_with_an_unsupported_option_still_runs():
    with pytest.warns(UserWarning, match="xla_there_is_no_such_option"):
        function = CompiledFunction(lambda x: x + 1, UNKNOWN)
    assert function(1.0) == 2.0


def test_an_unsupported_option_is_warned_about_once():
    with pytest.warns(UserWarning) as caught:
        jit.supported_options(UNKNOWN)
        jit.supported_options(UNKNOWN)
        jit.supported_options({**UNKNOWN, "xla_backend_optimization_level": "1"})
    assert len(caught) == 1


def test_the_warning_says_what_is_lost(monkeypatch):
    monkeypatch.setattr(jit, "_compiles_with", lambda options: False)
    expected = (
        r"xla_cpu_multi_thread_eigen=False.*inference runs slower.*"
        r"Results stay the same, and nothing needs to be done"
    )
    with pytest.warns(UserWarning, match=expected):
        assert jit.supported_options({"xla_cpu_multi_thread_eigen": False}) == {}


def test_every_shipped_option_has_a_stated_effect():
    options = {"xla_backend_optimization_level", "xla_llvm_disable_expensive_passes"}
    options |= {"xla_cpu_use_fusion_emitters", *tuning.LOW_LATENCY}
    assert set(tuning.OPTION_EFFECTS) == options


def test_supported_options_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.supported_options(tuning.LOW_LATENCY) == tuning.LOW_LATENCY


def test_a_compiled_function_can_be_traced_inside_another():
    inner = low_latency_jit(lambda x: jnp.sin(x) + 1)
    np.testing.assert_allclose(jax.jit(lambda x: 2 * inner(x))(0.5), 2 * np.sin(0.5) + 2, rtol=1e-6)


def test_run_once_returns_the_result():
    np.testing.assert_array_equal(run_once(lambda x, y: x + y, jnp.ones(2), 1.0), [2.0, 2.0])


def test_floats_have_the_default_dtype():
    assert floats(np.arange(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert floats(np.arange(3)).dtype == jnp.float64
