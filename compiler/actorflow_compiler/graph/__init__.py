"""The logical graph that passes hand on."""
