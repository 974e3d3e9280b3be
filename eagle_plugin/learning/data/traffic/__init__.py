"""Recorded traffic on the disk: the writer process filters and writes it, commands show and export it."""
