"""Prompt files and data sets: formats, detection, and prompts in normal form."""
