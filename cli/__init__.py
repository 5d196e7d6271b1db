"""The Typer command line: one command a file."""
