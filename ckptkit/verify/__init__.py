"""Proof by training: the same losses under every strategy, after every conversion, from the old and the new script."""
