"""`python -m loomfast` is the command line."""

from loomfast.cli import main

main()
