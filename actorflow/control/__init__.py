"""The control plane: ranks join, agree on common steps, pull from each other and notice who has failed."""
