"""Run the quick benchmarks one after the other: python -m benchmarks."""

import subprocess
import sys

QUICK = ("tracing", "drawing")


def main() -> None:
    """Run each in a process of its own, so that none inherits another's compilations."""
    for name in QUICK:
        print(f"\n## {name}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
