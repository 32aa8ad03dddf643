"""Boxing: the communication that takes a tensor from one layout to another."""
