"""The feature store: extraction of the target's hidden states, shards, objects below a URL."""
