"""The one exception of its own that truncdet raises: a guarantee could not be kept."""


class TruncdetError(RuntimeError):
    """A guarantee of this library could not be kept; wrong arguments are ValueError/TypeError."""
