"""Constants that were tuned for the speed of XLA on a CPU.

None of them changes a result beyond rounding. Each says what it trades off and which benchmark
shows it; run that benchmark before and after changing the value.
"""

CompilerOptions = dict[str, str | bool]

# Programs that run once or a few times. The first optimisation level without LLVM's most expensive
# passes halves the compilation time, and the code is nearly as fast; level 0 would make it several
# times slower. Fusions compile faster without the newer emitters.
# Benchmark: `python -m benchmarks compiling`.
FAST_COMPILE: CompilerOptions = {
    "xla_backend_optimization_level": "1",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}

# Training steps. XLA would hand products and sums of a few hundred rows to YNNPACK, which is slower
# at these sizes, and ten times slower for a sum over a short first axis.
# Benchmark: `python -m benchmarks training`.
NO_YNNPACK: CompilerOptions = {"xla_cpu_experimental_ynn_fusion_type": ""}

# Inference, which consists of hundreds of small products in sequence. Waking a second thread takes
# longer than such a product; large products lose the second core.
# Benchmark: `python -m benchmarks filtering`.
LOW_LATENCY: CompilerOptions = {**NO_YNNPACK, "xla_cpu_multi_thread_eigen": False}

# What is lost where XLA does not support an option.
OPTION_EFFECTS = {
    "xla_backend_optimization_level": (
        "lowers the optimisation level of programs that run once; without it they compile slower"
    ),
    "xla_llvm_disable_expensive_passes": (
        "skips LLVM's most expensive passes; without it programs that run once compile slower"
    ),
    "xla_cpu_use_fusion_emitters": (
        "selects the faster-compiling fusion emitters; without it programs that run once compile "
        "slower"
    ),
    "xla_cpu_experimental_ynn_fusion_type": (
        "keeps small matrix products out of YNNPACK; without it training and inference run slower"
    ),
    "xla_cpu_multi_thread_eigen": (
        "keeps small matrix products on one thread; without it inference runs slower"
    ),
}

# Batches are padded to a multiple of this many entries, which fill a vector register. XLA computes
# a remainder one entry at a time, which can take longer than all full vectors; padding wastes up to
# seven entries.
# Benchmark: `python -m benchmarks filtering`.
VECTOR_WIDTH = 8

# Loop entries of at most this many numbers are packed into one array. Separate entries are copied
# separately at each step, and more than eight of them make XLA use a second thread; packing large
# ones costs more copying than it saves.
# Benchmark: `python -m benchmarks filtering`.
MAX_PACKED_SIZE = 256

# Loops over the columns of matrices up to this size are unrolled: faster code, but the compilation
# time grows with the size.
# Benchmark: `python -m benchmarks compiling`.
MAX_UNROLLED_COLUMNS = 6

# LAPACK calls on batches of matrices that take up to this many operations are not divided among
# threads by jaxlib, see `lapack`. Larger values risk a hang; smaller ones make more, smaller calls.
MAX_UNDIVIDED_WORK = 199_999

# Triangular weight matrices are multiplied in column blocks of about this many units, so that some
# of the zeros above the diagonal are not multiplied. Smaller blocks skip more of them, but the many
# small products take longer than they save.
# Benchmark: `python -m benchmarks training`.
TRIANGULAR_BLOCK_SIZE = 100

# The sampler of autoregressive networks unrolls up to this many steps; more are divided into about
# this many loops, of at least this many steps each. More loops and unrolled steps draw faster,
# because fewer products with units that are still zero are computed, and compile slower.
# Benchmark: `python -m benchmarks drawing`.
MAX_UNROLLED_SAMPLING_STEPS = 6
NUM_SAMPLING_LOOPS = 4
MIN_LOOP_LENGTH = 4

# XLA inlines matrix products of up to this many multiplications and passes larger ones to Eigen,
# which takes two to three times as long for a few dozen rows. Larger products are divided into one
# of these numbers of parts if that makes them small enough; more parts are more code to compile.
# Benchmark: `python -m benchmarks filtering`.
MAX_INLINED_PRODUCT = 2**14
PRODUCT_PARTS = (1, 2, 4)

# Sequential sums over particles process this many of them in one iteration of the loop. With more
# than eight, XLA's CPU backend generates slow code for the loop body.
# Benchmark: `python -m benchmarks resampling`.
RESAMPLING_UNROLL = 4

# Populations are processed in batches of about this many bytes: larger ones do not fit into the
# processor's caches, and memory would grow with the number of particles times the network size.
# Benchmark: `python -m benchmarks growth`.
WORKING_BYTES = 16 * 2**20

# With at most this many particles any program runs fast, and the program is compiled with
# `FAST_COMPILE`.
# Benchmark: `python -m benchmarks firstanswer`.
FEW_PARTICLES = 100

# The largest working set of the networks in all runs with which one method is tried, and the memory
# of one batch of these runs. Larger values allow more particles and make planning slower.
# Benchmark: the phase "plan" of `python -m benchmarks firstanswer`.
PLAN_WORK_BYTES = 2**30
PLAN_BATCH_BYTES = 256 * 2**20

# The largest number of densities evaluated at a time to test whether a conditional belongs to a
# family. More would not be faster, and take more memory.
# Benchmark: the phase "assemble" of `python -m benchmarks firstanswer`.
MAX_TESTED_DENSITIES = 2**24

# A program that compiled faster than this is not cached on disk: reading it back takes as long.
# Benchmark: the cold answers of `python -m benchmarks newdata`.
MIN_CACHED_SECONDS = 0.2

# The compilation cache's size on disk: a larger cache serves more models. Not a matter of speed.
MAX_CACHE_BYTES = 2**30
