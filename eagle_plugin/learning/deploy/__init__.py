"""A trained head on its way to a server: the package that an engine serves, and the watch over its acceptance."""
