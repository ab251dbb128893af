"""Values that packages which do not import each other agree on."""

IGNORED = -100
"""Target of a position at which nothing is predicted, as in torch's `cross_entropy` and transformers' labels."""
