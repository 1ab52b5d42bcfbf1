"""Flows that ship with loomfast, because the command line runs them. They use the public door only."""
