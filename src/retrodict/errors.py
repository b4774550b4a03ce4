"""Exceptions for incorrect input: an unsupported model, invalid data, or an invalid request."""


class UnsupportedModel(ValueError):  # noqa: N818 (public name)
    """The model cannot be compiled; the message names the site, the reason and the remedy."""


class DataError(ValueError):
    """The data do not fit the model; the message names the site and says what was expected."""


class InputError(ValueError):
    """A command of the command line cannot be executed; the message gives reason and remedy."""
