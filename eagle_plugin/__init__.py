"""EAGLE speculative decoding for stock inference engines."""

__version__ = "0.1.0"
