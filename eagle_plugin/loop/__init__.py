"""The whole loop in one command: record traffic, train on it, measure (docs/loop.md)."""
