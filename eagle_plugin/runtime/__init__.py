"""A decode round without an engine: its captured functions, its costs, its random numbers, its start and its test."""
