"""Measurements of a checkout; not part of the package."""
