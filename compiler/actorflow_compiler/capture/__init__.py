"""Trace a step of the script into its logical graph."""
