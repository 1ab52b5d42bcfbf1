"""The sans-I/O core: rules and records, decided without a clock, a loop, a socket or randomness."""
