"""What needs a GPU: `make gpu`, see docs/gpu.md."""
