"""The control plane: ranks join, agree on common steps, pull data from each other and detect failures."""
