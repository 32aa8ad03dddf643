"""Lower a graph with layouts to what each rank does, and cut that into the actors of a plan."""
