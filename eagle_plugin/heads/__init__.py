"""Draft heads: the registry of their kinds, their architectures as torch modules, their checkpoint formats."""
