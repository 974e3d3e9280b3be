"""Hidden states of the target, in shards below any URL."""
