"""`python -m vitrail`: the command line."""

from vitrail.cli import main

main()
