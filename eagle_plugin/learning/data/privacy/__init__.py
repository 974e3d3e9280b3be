"""Finds private data in prompts and answers, and drops or redacts it."""
