"""The serving benchmark: tokens per second of several servers under closed-loop load."""
