"""Types that every package uses."""

from collections.abc import Mapping
from typing import TypeAlias

from jaxtyping import Array

Values: TypeAlias = Mapping[str, Array]
"""Arrays by the name of their site."""
