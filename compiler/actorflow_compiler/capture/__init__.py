"""A step of the script goes in; its logical graph comes out."""
