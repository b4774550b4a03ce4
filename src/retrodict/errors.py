"""The two ways a user's input can be wrong: the model, or the data."""


class UnsupportedModel(ValueError):  # noqa: N818 (the name is the public interface's)
    """The model cannot be compiled; the message names the site, the reason and the remedy."""


class DataError(ValueError):
    """The data do not fit the model; the message names the site, expectation and finding."""
