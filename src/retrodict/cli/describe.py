"""Describe a model's structure and its training, as text and as plain data."""

from math import isfinite
from pathlib import Path
from typing import Any

from retrodict.compiled import Compiled, parameter_count
from retrodict.graph.graph import Graph
from retrodict.inverse.inverse import Inverse


def describe_structure(graph: Graph, inverse: Inverse) -> str:
    """Describe the sites and the factors of the inverse, one per line."""
    width = max(map(len, graph.sites))
    lines = ["sites"]
    for name, site in graph.sites.items():
        role = "observed" if site.observed else "latent"
        shape = f" {list(site.shape)}" if site.shape else ""
        plates = f" in {', '.join(site.plates)}" if site.plates else ""
        time = " over time" if site.time else ""
        lines.append(f"  {name:<{width}}  {role:<8}  {site.distribution}{shape}{plates}{time}")
    lines += ["", f"inverse ({inverse.method}), in sampling order"]
    for factor in inverse.factors:
        context = ", ".join(sorted(factor.context)) or "nothing"
        plates = f" for each of {', '.join(factor.plates)}" if factor.plates else ""
        time = " at every step" if factor.time else ""
        prior = " (from the prior)" if factor.from_prior else ""
        lines.append(f"  {', '.join(factor.latents)} given {context}{plates}{time}{prior}")
    return "\n".join(lines)


def structure_record(graph: Graph, inverse: Inverse) -> dict[str, Any]:
    """Return the sites, edges and factors as plain data."""
    site_fields = ("observed", "distribution", "shape", "plates", "time")
    return {
        "sites": {
            name: {field: getattr(site, field) for field in site_fields}
            for name, site in graph.sites.items()
        },
        "edges": [(edge.parent, edge.child) for edge in graph.edges],
        "inverse": inverse.method,
        "factors": [
            {
                "latents": factor.latents,
                "context": sorted(factor.context),
                "plates": factor.plates,
                "time": factor.time,
                "network": None if factor.from_prior else str(factor.network),
            }
            for factor in inverse.factors
        ],
    }


def describe_training(compiled: Compiled) -> str:
    """Describe the training of each network, one per line, and the plan for inference."""
    lines = []
    for name, history in compiled.history.networks.items():
        steps = history.steps[-1] if history.steps else 0
        loss = f"{history.best_loss:.3f} nats" if isfinite(history.best_loss) else "unknown"
        lines.append(
            f"{name}: {steps} steps in {history.seconds:.0f} s, held-out loss {loss}, "
            f"{history.stopped}"
        )
    dropped = sum(compiled.history.rejected.values())
    lines.append(f"{compiled.history.simulated} draws simulated, {dropped} rejected")
    plan = compiled.plan
    sizes = ", ".join(f"{name} {ess:.0f}" for name, ess in plan.ess.items())
    comparison = f" (effective sample sizes of {plan.num_particles} particles: {sizes})"
    lines.append(f"inference method: {plan.method}{comparison if sizes else ''}")
    return "\n".join(lines)


def training_record(compiled: Compiled, path: Path) -> dict[str, Any]:
    """Return the training of each network and the plan for inference as plain data."""
    plan = compiled.plan
    return {
        "path": str(path),
        "parameters": parameter_count(compiled.networks),
        "networks": {
            name: {
                "steps": history.steps[-1] if history.steps else 0,
                "seconds": history.seconds,
                "heldout_loss": history.best_loss,
                "stopped": history.stopped,
            }
            for name, history in compiled.history.networks.items()
        },
        "simulated": compiled.history.simulated,
        "rejected": [
            {"site": site, "reason": reason, "draws": number}
            for (site, reason), number in compiled.history.rejected.items()
        ],
        "plan": {"method": plan.method, "ess": dict(plan.ess)},
    }
