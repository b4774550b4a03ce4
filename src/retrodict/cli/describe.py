"""A graph with its inverse, or a compiled model, in; a few lines of text, or plain data, out."""

from math import isfinite
from pathlib import Path
from typing import Any

from retrodict.cli.resultfiles import finite
from retrodict.compiled import Compiled, parameter_count
from retrodict.graph.graph import Graph
from retrodict.inverse.inverse import Inverse


def structure(found: Graph, inverse: Inverse) -> str:
    """Sites and factors, a line each."""
    width = max(map(len, found.sites))
    lines = ["sites"]
    for name, site in found.sites.items():
        role = "observed" if site.observed else "latent"
        shape = f" {list(site.shape)}" if site.shape else ""
        inside = f" in {', '.join(site.plates)}" if site.plates else ""
        steps = " over time" if site.time else ""
        lines.append(f"  {name:<{width}}  {role:<8}  {site.distribution}{shape}{inside}{steps}")
    lines += ["", f"turned round ({inverse.method}), in the order drawn"]
    for factor in inverse.factors:
        seen = ", ".join(sorted(factor.context)) or "nothing"
        repeated = f" for each of {', '.join(factor.plates)}" if factor.plates else ""
        steps = " at every step" if factor.time else ""
        own = " (the model's own conditional)" if factor.own else ""
        lines.append(f"  {', '.join(factor.latents)} given {seen}{repeated}{steps}{own}")
    return "\n".join(lines)


def structure_record(found: Graph, inverse: Inverse) -> dict[str, Any]:
    """Sites, edges and factors."""
    return {
        "sites": {
            name: {
                "observed": site.observed,
                "distribution": site.distribution,
                "shape": list(site.shape),
                "plates": list(site.plates),
                "time": site.time,
            }
            for name, site in found.sites.items()
        },
        "edges": [[edge.parent, edge.child] for edge in found.edges],
        "inverse": inverse.method,
        "factors": [
            {
                "latents": list(factor.latents),
                "context": sorted(factor.context),
                "plates": list(factor.plates),
                "time": factor.time,
                "network": None if factor.own else str(factor.network),
            }
            for factor in inverse.factors
        ],
    }


def training(compiled: Compiled) -> str:
    """What became of every network, a line each, and the plan."""
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
    tried = ", ".join(f"{name} {ess:.0f}" for name, ess in compiled.plan.ess.items())
    measured = f" (effective sample sizes of {compiled.plan.num_particles}: {tried})"
    lines.append(f"to infer with: {compiled.plan.method}{measured if tried else ''}")
    return "\n".join(lines)


def training_record(compiled: Compiled, path: Path) -> dict[str, Any]:
    """What became of every network, and the plan."""
    plan = compiled.plan
    found = {
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
            {"site": site, "reason": why, "draws": number}
            for (site, why), number in compiled.history.rejected.items()
        ],
        "plan": {"method": plan.method, "ess": dict(plan.ess)},
    }
    plain: dict[str, Any] = finite(found)
    return plain
