"""The kernels in plain Python: the specification that `_native` is checked against."""
