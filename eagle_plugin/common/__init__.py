"""What every room may use: errors, files, progress, YAML, how a command ends, devices."""
