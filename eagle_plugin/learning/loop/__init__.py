"""The closed loop: record traffic, train on it, measure, and exchange the head (docs/loop.md)."""
