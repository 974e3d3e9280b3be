"""Does this device compute what the oracles say? Every kernel on the shapes of a model, and a captured toy round."""
