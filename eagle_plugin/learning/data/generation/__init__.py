"""Makes token rows: the target answers prompts, or recorded answers are rendered."""
