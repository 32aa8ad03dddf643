"""The version of this package, for rooms that may not ask its front door."""

__version__ = "0.1.0"
