"""How one layout becomes another."""
