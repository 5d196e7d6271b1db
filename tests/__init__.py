"""The tests: a mirror of the source, and generic tests that pick newcomers up from the folders."""
