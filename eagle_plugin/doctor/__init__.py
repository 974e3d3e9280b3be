"""Says who would serve a start command, and why, without starting it."""
