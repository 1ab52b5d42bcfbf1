"""The benchmarks: one function per case, each returning seconds per call for the product and its peers.

Every case checks that the answers are equal before it times anything. Peers that are not installed are left
out. Not here: what is printed, and which ratio is good enough.
"""
