"""What the script holds in place of tensors that plans own, and where those lie in memory."""
