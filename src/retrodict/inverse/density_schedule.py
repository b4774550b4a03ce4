"""Which densities of the model enter the weights at which stage of sampling.

The target after stage n is the product of the densities whose variables have all been sampled,

    γ_n(x_{1:n}) = ∏ { p(v | parents of v) : v and its parents are data or sampled by stage n },

so every density is counted exactly once, at the stage where the last of its variables is sampled.
Stage n multiplies the weights by γ_n / (γ_{n−1} q_n), and the product over all stages is
p(x, y) / q(x | y). Importance sampling, SMC, divide and conquer and tempering follow this schedule.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from retrodict.graph.graph import Graph
from retrodict.inverse.factors import Factor
from retrodict.inverse.inverse import Inverse


@dataclass(frozen=True)
class DensitySchedule:
    """The stages at which the densities of a model's sites are counted.

    A stage is a set of factors that are sampled together: one factor outside of time, or all
    factors of the steps of one scan. Stages are numbered from 0 in sampling order.

    Attributes:
        inverse: the inverse whose factors are sampled.
    """

    inverse: Inverse

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.inverse.graph

    @cached_property
    def stages(self) -> tuple[tuple[Factor, ...], ...]:
        """The factors of each stage, in sampling order."""
        sites = self.graph.sites

        def stage_key(numbered: tuple[int, Factor]) -> tuple[bool, int | None]:
            number, factor = numbered
            return factor.time, sites[factor.latents[0]].scan if factor.time else number

        groups = groupby(enumerate(self.inverse.factors), key=stage_key)
        return tuple(tuple(factor for _, factor in group) for _, group in groups)

    @cached_property
    def sampling_stage(self) -> dict[str, int]:
        """For each latent site, the stage at which it is sampled."""
        return {
            name: number
            for number, factors in enumerate(self.stages)
            for factor in factors
            for name in factor.latents
        }

    @cached_property
    def prior_latents(self) -> frozenset[str]:
        """Latents sampled from the model's conditional.

        Their density and their log q are equal, so that neither is counted.
        """
        return frozenset(n for f in self.inverse.factors if f.from_prior for n in f.latents)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The sites whose densities enter the weights, in program order."""
        return tuple(name for name in self.graph.sites if name not in self.prior_latents)

    @cached_property
    def closing_stage(self) -> dict[str, int]:
        """For each counted site, the stage that samples the last variable of its density.

        It is the first stage for a density that depends on data alone.
        """
        return {
            name: max(self.sampling_stage.get(v, 0) for v in (name, *self.graph.parents(name)))
            for name in self.counted
        }

    @cached_property
    def closing(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the sites whose densities it counts."""
        return _invert(self.closing_stage, len(self.stages))

    def last_reads(self, contexts: Sequence[Collection[str]]) -> dict[str, int]:
        """For each latent, the last stage that reads its value, to sample or to count a density.

        Args:
            contexts: for each stage, the sites that its proposal reads.

        Returns:
            latent → stage, or −1 for a latent that no stage reads.
        """
        last = dict.fromkeys(self.graph.latent, -1)
        for number, (context, closing) in enumerate(zip(contexts, self.closing, strict=True)):
            scored = (v for name in closing for v in (name, *self.graph.parents(name)))
            last |= {name: number for name in (*context, *scored) if name in last}
        return last

    @cached_property
    def merging_stage(self) -> dict[str, int]:
        """For each counted site, the stage that counts its density in divide and conquer.

        There every stage has one population for each element of its factor's plates, and a density
        is counted at the first stage where all its variables are sampled and the site lies in all
        of these plates. It is the number of stages for a density that no stage can count, which is
        left to the root, where all populations are merged.
        """
        stages = self.closing_stage.items()
        return {name: self._first_within_plates(name, stage) for name, stage in stages}

    def _first_within_plates(self, name: str, earliest: int) -> int:
        plates = set(self.graph.sites[name].plates)
        factors = self.inverse.factors
        stages = range(earliest, len(factors))
        return next((n for n in stages if plates.issuperset(factors[n].plates)), len(factors))

    @cached_property
    def merging(self) -> tuple[tuple[str, ...], ...]:
        """For each stage of divide and conquer, and last for the root, the sites it counts."""
        return _invert(self.merging_stage, len(self.inverse.factors) + 1)

    @cached_property
    def marginal_stages(self) -> dict[int, int]:
        """When a marginal of a factor's latents replaces their prior, in divide and conquer.

        A stage whose latents have a prior that is counted later has no proper target.
        From that stage on, a learned marginal m of the factor's latents is a part of the target; it
        is divided out at the stage that counts the last of their priors.

        Returns:
            first stage with the marginal → stage that divides it out.
        """
        last = {
            number: max(self.merging_stage.get(name, number) for name in factor.latents)
            for number, factor in enumerate(self.inverse.factors)
        }
        return {number: end for number, end in last.items() if end > number}


def _invert(stages: dict[str, int], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The names of each stage."""
    numbers = range(num_stages)
    return tuple(tuple(n for n, stage in stages.items() if stage == number) for number in numbers)
