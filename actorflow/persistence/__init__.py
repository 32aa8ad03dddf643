"""Checkpoints: each rank writes the parts that it owns, and reads its parts of them under any plan."""
