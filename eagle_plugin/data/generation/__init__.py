"""Answers of the target, rendered as token rows."""
