"""What keeps the nodes of a run from coming together: a check for each condition, beforehand and when a join fails."""
