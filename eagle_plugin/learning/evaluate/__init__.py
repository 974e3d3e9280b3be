"""What users run on a draft head: the check against its target, accept lengths on responses, statistics."""
