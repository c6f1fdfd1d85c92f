"""The version of this release, for the code and for the build."""

__version__ = "0.2.0.dev0"
