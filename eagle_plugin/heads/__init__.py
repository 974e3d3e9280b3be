"""What a draft head is: its architectures as plain torch modules, and its checkpoint format."""
