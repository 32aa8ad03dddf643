"""What a traced step may read of values: variables, gradients, decisions, checks, and branches on them."""
