"""Collecting: what servers with `EAGLE_FEATURES` write into a feature store, and how a collection is completed."""
