"""What needs a GPU: `make gpu`, see docs/gpu-runs.md."""
