"""The inference methods of a model, their settings, and the sampler that runs each of them."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from retrodict.inference.divide_conquer import DivideAndConquer
from retrodict.inference.smc import SMC
from retrodict.inverse.plate_tree import divisible
from retrodict.particles.resampling import Resampler, resampler
from retrodict.proposal.proposal import Proposal

InferMethod = Literal["auto", "importance", "smc", "divide", "temper"]


@dataclass(frozen=True)
class Settings:
    """Settings of an inference method; a change of any of them needs another compilation.

    Attributes:
        num_particles: K.
        method: "importance", "smc", "divide" or "temper".
        resampling: the resampling scheme.
        ess_threshold: the share of K below which the effective sample size triggers resampling.

    Raises:
        ValueError: a setting is out of range.
    """

    num_particles: int
    method: str
    resampling: str | Resampler = "systematic"
    ess_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.num_particles < 1:
            raise ValueError(f"num_particles is {self.num_particles}; at least one is needed")
        if not 0 <= self.ess_threshold <= 1:
            raise ValueError(
                f"ess_threshold is {self.ess_threshold}; it is a share of K, from 0 to 1"
            )


def candidate_methods(proposal: Proposal) -> tuple[str, ...]:
    """The methods that the model's inverse allows, without tempering."""
    return ("importance", "smc", *(["divide"] if divisible(proposal.inverse) else []))


def first_choice(proposal: Proposal) -> str:
    """The method to use before any has been tried."""
    return "smc" if any(map(proposal.runs_forward, proposal.stages)) else "importance"


def make_sampler(
    proposal: Proposal, settings: Settings, ess_threshold: Float[Array, ""] | None = None
) -> SMC | DivideAndConquer:
    """The sampler that runs a method.

    Args:
        proposal: samples the latents.
        settings: with a method among `candidate_methods`.
        ess_threshold: a traced threshold in place of that of the settings.

    Raises:
        ValueError: the model's inverse does not allow the method.
    """
    candidates = candidate_methods(proposal)
    if settings.method not in candidates:
        raise ValueError(
            f"method is {settings.method!r}; for this model there are 'auto', "
            f"{', '.join(map(repr, (*candidates, 'temper')))}"
        )
    scheme = resampler(settings.resampling)
    if settings.method == "divide":
        return DivideAndConquer(proposal, settings.num_particles, scheme)
    threshold: float | Array = 0.0 if settings.method == "importance" else settings.ess_threshold
    if ess_threshold is not None:
        threshold = ess_threshold
    return SMC(proposal, settings.num_particles, scheme, threshold)
