"""The compiler: a user's step goes in, a plan comes out."""
