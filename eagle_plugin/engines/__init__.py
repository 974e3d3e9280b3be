"""Adapters to exact engine versions; no algorithm is born here."""
