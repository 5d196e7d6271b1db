"""The proof of a conversion: a run that was saved in one strategy goes on in another, and its losses do not notice."""
