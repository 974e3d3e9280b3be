"""The plugin inside vLLM."""
