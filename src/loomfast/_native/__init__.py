"""The compiled kernels. Same stems, names, parameters and order as `_pure`, which specifies them."""
