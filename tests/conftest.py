"""Settings for all tests, made before JAX starts."""

import os

# Tests compile many small programs and run each for a moment: what counts is the compiler's time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
