"""The whole loop in one command: serve with capture, train on the capture, measure, and exchange the head (docs/loop.md)."""
