"""What a step reads and changes of the user's Python: found, guarded, and put back at each call."""
