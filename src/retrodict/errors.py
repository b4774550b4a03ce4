"""The ways a user's input can be wrong: the model, the data, or what was asked for."""


class UnsupportedModel(ValueError):  # noqa: N818 (the name is the public interface's)
    """The model cannot be compiled; the message names the site, the reason and the remedy."""


class DataError(ValueError):
    """The data do not fit the model; the message names the site, expectation and finding."""


class InputError(ValueError):
    """What the command line asks for cannot be done; the message says why, and what can."""
