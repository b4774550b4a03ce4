"""The error for data that no particle makes possible."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from retrodict.errors import DataError


class ImpossibleData(DataError):  # noqa: N818 (named beside DataError)
    """No particle gives the data a positive density.

    Args:
        failure: what happened, as the beginning of the message.
        possible: for each site, whether any particle gives it a positive density.
    """

    def __init__(self, failure: str, possible: Mapping[str, Any]) -> None:
        names = [f"'{name}'" for name, ok in possible.items() if not np.all(ok)]
        if names:
            finding = f"no particle gives a positive density to {', '.join(names)}"
        else:
            finding = "each site is possible for some particle, but no particle fits all sites"
        super().__init__(
            f"{failure}: {finding}. Check that the values can come from the model; if they are "
            "possible but rare, use more particles"
        )
