"""Calls of jobs enter as they are made; a bar, a table of ranks, or plain lines leave while a run goes on."""
