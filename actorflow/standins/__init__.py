"""Stand-ins that the script holds in place of tensors that plans own, and the locations that hold them."""
