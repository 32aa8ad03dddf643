"""A graph with layouts goes in; the actors of a plan come out."""
