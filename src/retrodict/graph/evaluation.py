"""Results of running a model: values and densities of its sites, and the model's structure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpyro.distributions as dist
from jaxtyping import Array

from retrodict.graph.moments import Moments

Expect: TypeAlias = Mapping[str, Callable[[Moments], Array]]


class CarryKey(NamedTuple):
    """Names a leaf of a scan's carry, by the numbers of both."""

    scan: int
    leaf: int


class Axis(NamedTuple):
    """An index axis of a site: a plate, with its position in the site's value (without time)."""

    plate: str
    position: int
    size: int


@dataclass(frozen=True)
class SiteRecord:
    """A sample site as one run of the model visits it.

    Attributes:
        name: of the site.
        distribution: the name of its distribution's class, without wrappers.
        fn: its distribution, whose parameters may be tracers.
        support: a constraint, whose bounds may be tracers.
        sample_shape: as it was passed to `numpyro.sample`.
        frames: NumPyro's records of the plates around the site.
        axes: the plates, with their positions in the value.
        scan: the number of the scan that contains it.
        has_obs: whether the model passes a value to it (obs=…).
        masked: whether a mask is applied to its density.
    """

    name: str
    distribution: str
    fn: dist.Distribution
    support: Any
    sample_shape: tuple[int, ...]
    frames: tuple[Any, ...]
    axes: tuple[Axis, ...]
    scan: int | None
    has_obs: bool
    masked: bool


class Evaluation(NamedTuple):
    """The result of one run of a model.

    Attributes:
        values: every sample site, observed or not; a scan's sites have a leading axis of time.
        log_density: for each site log f_i or log g_j, one number per random variable: the axes are
            time, if any, then the site's plates in the order of its array axes.
        deterministic: the values of `numpyro.deterministic` sites.
        support_bounds: the parameters of each site's support, which may depend on other sites.
        parameters: the parameters of each site's distribution, each with its batch axes first.
        carries: for each scan, the leaves of the carry that every step starts from, stacked.
        moments: mean and variance of each site's distribution, on request; see `moments`.
        obs_values: the values that the model passes to sites (obs=…).
        masks: which entries of a site's value count in its density, of sites with a mask.
    """

    values: dict[str, Array]
    log_density: dict[str, Array]
    deterministic: dict[str, Array]
    support_bounds: dict[str, list[Array]]
    parameters: dict[str, list[Array]]
    carries: dict[CarryKey, Array]
    moments: dict[str, Moments]
    obs_values: dict[str, Array]
    masks: dict[str, Array]

    @staticmethod
    def empty() -> "Evaluation":
        """An evaluation without sites."""
        return Evaluation({}, {}, {}, {}, {}, {}, {}, {}, {})


@dataclass
class ModelStructure:
    """What a run shows of a model that does not depend on values.

    Attributes:
        sites: the sample sites in program order.
        order: names of sample and deterministic sites in program order.
        shapes: of all values, with their types.
        scan_lengths, reversed_scans: of the scans in program order.
    """

    sites: dict[str, SiteRecord] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    shapes: dict[str, Any] = field(default_factory=dict)
    scan_lengths: list[int] = field(default_factory=list)
    reversed_scans: list[bool] = field(default_factory=list)
