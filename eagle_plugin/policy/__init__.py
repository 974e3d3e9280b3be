"""Which shape the trees of a round get: what a round costs, what it yields, and what is told of it."""
