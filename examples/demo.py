"""Read the power-plant pumps model, turn its graph round, and draw both.

The hierarchical model of Paige & Wood (2016), sec. 5.2. Run with `make demo`.
"""

import argparse
from pathlib import Path

import numpyro
import numpyro.distributions as dist

import retrodict as rd


def pumps(t=None, y=None, n=10):
    """Failures y of n pumps in t thousand hours each, with rates theta from a common gamma."""
    alpha = numpyro.sample("alpha", dist.Exponential(1.0))
    beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
    with numpyro.plate("pumps", n):
        t = numpyro.sample("t", dist.Exponential(1 / 50), obs=t)
        theta = numpyro.sample("theta", dist.Gamma(alpha, beta))
        numpyro.sample("y", dist.Poisson(theta * t), obs=y)


def main() -> None:
    """Print sites, edges and factors, and save the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)

    graph = rd.trace(pumps, ["t", "y"])
    print("The model")
    for site in graph.sites.values():
        kind = "observed" if site.observed else "latent"
        print(f"  {site.name:6} {kind:9} {site.distribution}{site.shape} {' '.join(site.plates)}")
    for edge in graph.edges:
        print(f"  {edge.parent} → {edge.child} ({', '.join(sorted(edge.kinds()))})")
    pictures = [graph.render().save(folder / "pumps.svg")]

    for method in ("blanket", "faithful"):
        inverse = rd.invert(graph, method)
        print(f"\nTurned round, {method}")
        for factor in inverse.factors:
            repeated = f"  for each of {' × '.join(factor.plates)}" if factor.plates else ""
            seen = ", ".join(sorted(factor.context))
            print(f"  ({', '.join(factor.latents)}) ← {seen}{repeated}")
        pictures.append(inverse.render().save(folder / f"pumps-{method}.svg"))

    print("\nPictures:", *pictures)


if __name__ == "__main__":
    main()
