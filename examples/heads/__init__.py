"""Draft heads for SmolLM2-135M-Instruct, each in a folder of its name; `eagle_plugin.models.shipped` finds them."""
