"""The whole loop in one command: record traffic, train on it, measure, and exchange the head (docs/loop.md)."""
