"""`python -m ckptkit`: the command line."""

from .cli.main import run

run()
