"""From prompts to a feature store: read, filter, render, ask the target, extract its hidden states."""
