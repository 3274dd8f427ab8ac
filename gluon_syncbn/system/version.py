"""Holds the version, in a file of its own that ``setup.py`` can read without importing the package."""

__version__ = "0.3.0"
