"""The studies: which runs each compares, and what is claimed about them."""
