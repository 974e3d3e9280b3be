"""Reads prompts: built-in ones, evaluation sets, and files in the formats of many tools."""
