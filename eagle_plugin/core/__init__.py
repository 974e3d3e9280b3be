"""The mathematics of speculative decoding as small torch oracles: what every kernel is tested against."""
