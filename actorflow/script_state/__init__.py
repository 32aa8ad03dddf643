"""The Python state of the user's script that a step reads and changes: found, guarded, and restored at each call."""
