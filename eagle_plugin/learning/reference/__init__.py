"""A small, slow, obviously right speculative decoder on transformers, against which engines are tested."""
