"""Adapters to exact engine versions, and the decode round that they share."""
