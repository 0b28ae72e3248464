"""The benchmarks behind the numbers in the documentation.

Run them from the project's root. Unless a module says otherwise, contenders take turns, in an order
that rotates from round to round, and a ratio is the median of the ratios inside each round.
"""
