"""`python -m loomfast.cli`, for where the `loomfast` script is not on the path."""

from loomfast.cli import main

main()
