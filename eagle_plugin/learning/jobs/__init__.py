"""A recipe as a sequence of sub-commands, from prompts to a trained head with its measured gain."""
