"""Private data in prompts: found, redacted or dropped."""
