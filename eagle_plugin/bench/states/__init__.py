"""The benchmark of a trained head: the target without EAGLE, with the head before and with the head after training."""
