"""Tests whether a device computes what the oracles say: every kernel on a model's shapes, and a captured toy round."""
