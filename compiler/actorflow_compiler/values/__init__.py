"""What a traced step may do with values of tensors: read variables and gradients, branch, and check."""
